"""The HTTP gateway: the OpenAI protocol, adapter management, metrics and the page.

A gateway is a client of the controller and has no state that another one could miss, so several run
next to each other on one controller.
"""
