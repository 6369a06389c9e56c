"""A small host with FLUTE's module names, seams, call order and transport, for the tests.

Written for them; nothing of FLUTE's is in it. Like FLUTE, it binds select_strategy by name in two
modules, makes a client object for every client of every round, sends between processes one number
and float32 tensors, and in a run of one process hands its worker the server's own model.
"""
