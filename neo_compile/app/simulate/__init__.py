"""`neo simulate`: the engine's own scheduler on a virtual clock, for machines that are not at hand.

    command.py       the options, one load or a figure, tables and JSON
    virtual.py       scheduler and block pools without a model; tokens are counted, not computed
    setups.py        devices, hosts and models as a few effective rates
    load.py          one load under one policy
    figures.py       the paper's figures; `published.py`: what the paper has in them

Nothing here loads torch.
"""

from neo_compile.app.simulate.command import add_parser

__all__ = ["add_parser"]
