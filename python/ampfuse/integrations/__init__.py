"""One module for each framework, imported by who uses that framework and by nobody else.

=========================  =============================
``lightning``, ``fabric``  precision plugins
``accelerate``             levels for an ``Accelerator``
``transformers``           levels for a ``Trainer``
``timm``                   the optimizers by name
=========================  =============================

``pip install 'ampfuse[integrations]'`` installs the versions that these are tested with.
"""
