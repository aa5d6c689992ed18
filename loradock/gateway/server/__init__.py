"""The gateway process: routes, the OpenAPI document, sockets, start and end."""
