"""`doctor`: what a checkpoint, adapter, GGUF file or serving config really does with positions, and what is odd.

One check is one function, registered for the kind of thing that it looks at; see `findings`. Nothing that is read is
trusted: no code of a checkpoint runs, no pickle is opened, and no number is taken for one before it is looked at.
"""
