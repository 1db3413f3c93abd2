"""Options, scoring arms, memory estimates and rankings shared by the tasks."""
