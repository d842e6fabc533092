"""Servers under load: the same requests through one transport after another. `bench/serve.py` is the command.

`loads` says what is sent, `bodies` makes it, `client` sends it, `servers` start, `watch` and `inside` look on,
`figures` makes percentiles of it, `campaign` runs it all, `compare`, `tables`, `plots`, `goals` read what came out.
"""
