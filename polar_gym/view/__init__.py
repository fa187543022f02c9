"""A page for the browser that shows episodes: their conversations, tokens, forks, grading, and the run as a whole.

    summary      what the run page knows of an episode: one flat row
    blocks       everything else of an episode, as JSON and binary columns, compressed; the page decodes what it shows
    pieces       token ids > text
    annotations  per-token values of a trainer, from a sidecar file
    page         one HTML file with script, style and data, which needs no server
    follow       the same page on the loopback interface, with episodes as they are written

`page.js` (episodes) and `live.js` (the page of a rollout server) are bundles of `web/src/`, made by `npm run build` in
`web/`. Data never becomes markup: the pages make text nodes only, and their content security policy allows the one
script and the one style in them.

The room uses builders, engines, http, schema and the modules at the root. It does not read journals: the caller gives
the calls of each episode, where it has them. The room cli uses it. It has no plug-ins.
"""
