"""The record of a run of the tests that need a GPU."""

from benchmarks.gpu_tests import summary

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_graphs" name="test_a" time="1.5"/>
<testcase classname="tests.test_graphs" name="test_b[x]" time="0.25"><failure message="no">trace</failure></testcase>
<testcase classname="tests.test_triton_encode" name="test_c" time="0.25"><skipped/></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_counted_by_file_and_failures_named(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    assert summary(path) == {
        "outcomes": {"passed": 1, "failure": 1, "skipped": 1},
        "by_file": {"test_graphs": {"passed": 1, "failure": 1}, "test_triton_encode": {"skipped": 1}},
        "failed": ["test_graphs::test_b[x]"],
        "test_seconds": 2.0,
    }
