"""The commands of `esm-turbo`, one module each."""

from cyclopts import App

from esm_turbo import __version__
from esm_turbo.cli.commands.binders import binders
from esm_turbo.cli.commands.calibrate import calibrate
from esm_turbo.cli.commands.embed import embed
from esm_turbo.cli.commands.evaluate import evaluate
from esm_turbo.cli.commands.generate import generate
from esm_turbo.cli.commands.info import info
from esm_turbo.cli.commands.merge import merge
from esm_turbo.cli.commands.score import score
from esm_turbo.cli.commands.serve import serve
from esm_turbo.cli.commands.status import status
from esm_turbo.cli.commands.store import store
from esm_turbo.cli.commands.variants import variants
from esm_turbo.cli.commands.warmup import warmup
from esm_turbo.cli.inputs import with_checked_outputs

app = App(
    name="esm-turbo",
    version=__version__,
    suppress_keyboard_interrupt=False,
    help="A compressed key/value cache for the protein language models ESM-2, ESM-C and E1.\n\n"
    "`--debug` with any command adds the traceback to an error. Exit codes: 0 success; 1 some records failed, or the"
    " job failed; 2 wrong arguments or unusable input.",
)
for command in (
    calibrate,
    embed,
    generate,
    binders,
    store,
    evaluate,
    score,
    variants,
    serve,
    status,
    merge,
    info,
    warmup,
):
    app.command(with_checked_outputs(command))
