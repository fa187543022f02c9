"""What the HTTP ports of the rollout service and their clients share.

- `route`, `server_routes`, `node_routes`: the routes, of which servers, OpenAPI document, key checks and clients are
made;
- `application`: an application that serves routes, asks for their keys, and answers every error in one form;
- `edge`: reads bodies and parameters, and writes answers; `failures`: describes why a request failed;
- `keys`: the keys of the ports; `guard`: refuses web pages; `urls`: checks URLs; `lookups`: looks host names up;
- `careful`: what aiohttp's servers must not do with bodies and heads;
- `listener`: an application on a port; `silence`: ends connections that send nothing.

The room uses `polar_gym.protocol` and the rooms below it. The proxy, which has the wire formats' own routes and errors,
uses `careful`, `guard` and `silence`.
"""
