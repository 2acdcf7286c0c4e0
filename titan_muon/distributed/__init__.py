"""Where each matrix lives and how it moves; no math."""
