"""Applications of a cached context.

Each folder is one task and stands on `ContextModel` and `tasks.common` alone. No task imports another.
"""
