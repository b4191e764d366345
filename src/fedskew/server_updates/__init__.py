"""server_updates."""
