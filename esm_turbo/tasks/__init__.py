"""Applications of a cached context. Tasks depend on `ContextModel` and never on each other's internals."""
