"""Why mixed precision failed or did not pay: ``doctor`` says where the time of a training goes."""

from ampfuse.insight.doctor.session import doctor

__all__ = ["doctor"]
