"""Other libraries' interfaces on top of ampfuse."""
