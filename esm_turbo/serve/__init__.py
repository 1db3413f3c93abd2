"""A service for a group: one model with its contexts behind HTTP, and a page to use it from a browser.

`server` runs it. `app` puts it together from the `routes`, which turn requests into jobs (`checks`), and the `engine`,
whose one thread owns the model and its `contexts` and fills each batch from many jobs.
"""
