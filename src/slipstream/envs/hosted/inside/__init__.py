"""What runs in an environment process, in the environment's own interpreter: the standard library and the environment's
own packages, nothing of Slipstream.

The folder is loaded as a package of its own by `host.py`, so imports within it are relative. A setup names the module
of its kind of environment (`host.Hosted`), here or in another folder.
"""
