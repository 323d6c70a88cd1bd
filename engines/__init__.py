"""One module per compiler (compile, load, enqueue), the manifest of an engine directory, and the errors people read.

May import `plugins` and the compiler's own package, nothing else of twostroke. Networks, requests and scheduling
never belong here.
"""
