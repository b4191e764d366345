"""local_steps."""
