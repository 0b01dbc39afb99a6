"""The HTTP face: routes, media, routing and response formats. Never touches a graph or a model."""
