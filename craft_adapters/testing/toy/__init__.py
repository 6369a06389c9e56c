"""A rule as the server step of the toy host.

``plugin`` registers the adapter and imports nothing heavy, ``adapter`` translates between the host
and the rule, ``harness`` lets the conformance kit drive the host.
"""
