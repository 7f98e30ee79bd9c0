"""One module for each framework, which only users of that framework import.

=========================  =============================
``lightning``, ``fabric``  precision plugins
``accelerate``             levels for an ``Accelerator``
``transformers``           levels for a ``Trainer``
``timm``                   the optimizers by name
=========================  =============================

``pip install 'ampfuse[integrations]'`` installs the versions that these are tested with.
"""
