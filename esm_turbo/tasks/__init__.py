"""Applications of a cached context.

Each folder is one task. It builds on `ContextModel` and `tasks.common`, and imports no other task.
"""
