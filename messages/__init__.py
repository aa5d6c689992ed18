"""The vocabulary that clients, controller and engine share.

What it is: frozen msgspec Structs, one tagged union a direction, and their bytes. What it is not:
behaviour. Nothing here opens a socket, a file or a clock; it imports the standard library and
msgspec only. One rule: positions never move and new fields come last with a default, because
every Struct is encoded as an array and old logs are read for ever.
"""
