"""Graph passes from a Dynamo graph to linear stages. Each is `(gm, example_inputs, *, options) -> gm`."""
