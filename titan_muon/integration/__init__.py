"""The torchtitan plug-in: with ``titan_muon.train`` the only code that imports torchtitan."""
