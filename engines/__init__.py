"""One module per compiler (compile, load, enqueue), the manifest of an engine directory, the errors people read, and
the choices of a launch line in every spelling: what an engine has, and what a manifest settles.

May import `plugins` and the compiler's own package, nothing else of twostroke. Networks, requests and scheduling
never belong here.
"""
