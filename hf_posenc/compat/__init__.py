"""All uses of private names (with a leading `_`) of other libraries, and all differences between their releases.

There is a module for each library or task, and in it a function or base class for each need. The tests
`tests/test_compat*.py` check each of these against the installed releases and say what broke when one changes. The
modules are imported one by one, so that an optional library is not imported along with another.
"""
