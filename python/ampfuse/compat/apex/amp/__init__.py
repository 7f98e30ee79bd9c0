"""``apex.amp`` on :mod:`ampfuse.amp`."""

from ampfuse.compat.apex.amp import amp, frontend, handle, scaler
from ampfuse.compat.apex.amp.amp import init
from ampfuse.compat.apex.amp.frontend import initialize, load_state_dict, state_dict
from ampfuse.compat.apex.amp.handle import scale_loss

# isort: off
from ampfuse.amp import bfloat16_function, disable_casts, float_function, half_function
from ampfuse.amp import master_params, promote_function, register_bfloat16_function
from ampfuse.amp import register_float_function, register_half_function, register_promote_function

# Last: the attribute is the state itself, as it was in apex, not the module of the same name.
from ampfuse.compat.apex.amp._amp_state import _amp_state
