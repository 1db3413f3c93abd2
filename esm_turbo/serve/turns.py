"""Whose turn it is: jobs of many clients, each of which gets as many turns as any other, however much it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from esm_turbo.serve.jobs import Job

# Jobs that take turns, of all clients together; each has intermediate results in memory.
_BEGUN = 8


class Turns:
    """Jobs that wait for their next turn. Not safe for threads."""

    def __init__(self) -> None:
        # Clients in the order of their turns, and the jobs of each likewise.
        self._jobs: dict[str, list[Job]] = {}

    def __iter__(self) -> Iterator[Job]:
        return (job for jobs in self._jobs.values() for job in jobs)

    def add(self, job: Job) -> None:
        """Let a job wait for its first turn."""
        self._jobs.setdefault(job.client, []).append(job)

    def add_again(self, job: Job) -> None:
        """Let a job that had a turn wait for the next one: after others of its client, but before most new ones."""
        jobs = self._jobs.setdefault(job.client, [])
        jobs.insert(max(1, _BEGUN // len(self._jobs)) - 1, job)

    def take(self, fits: Callable[[Job], bool]) -> Job | None:
        """Take out the next job that fits, whose client then comes last; None if there is none."""
        for client, jobs in list(self._jobs.items()):
            for job in jobs:
                if not job.over and fits(job):
                    self.remove(job)
                    if client in self._jobs:
                        self._jobs[client] = self._jobs.pop(client)
                    return job
        return None

    def remove(self, job: Job) -> None:
        """Take a job out, if it is there."""
        jobs = self._jobs.get(job.client, [])
        if job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._jobs[job.client]

    def clear(self) -> list[Job]:
        """Take all jobs out."""
        jobs = list(self)
        self._jobs.clear()
        return jobs
