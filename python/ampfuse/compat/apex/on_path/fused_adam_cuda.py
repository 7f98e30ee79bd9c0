from ampfuse.compat.apex.installing import take_names

take_names()
