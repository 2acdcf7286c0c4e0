"""What pyproject.toml cannot say: configs/ is shipped inside the package, as its recipes."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["titan_muon*"]), "titan_muon.recipes"],
    package_dir={"titan_muon.recipes": "configs"},
    package_data={"titan_muon": ["py.typed"], "titan_muon.recipes": ["*.toml"]},
)
