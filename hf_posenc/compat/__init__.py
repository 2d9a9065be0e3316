"""What is private in the libraries that this package stands on: nothing else in it may use a name of theirs with `_`.

One module for each library, one function or base class for each need, and for each a contract in
tests/test_compat*.py, which say what broke when a release changes it. Where releases differ, the difference is
here and nowhere else. The modules are imported one by one, so that no optional library comes along with another.
"""
