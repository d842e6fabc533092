"""What operators get over HTTP, on loopback and only if asked for: metrics, health, and a page that shows both.

`address` says where one may listen, `http` speaks the protocol, `site` has the answers, `page.html` is the page.
"""
