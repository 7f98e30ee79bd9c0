"""Why mixed precision failed, or did not pay: meter, overflow explanation, doctor, advice."""
