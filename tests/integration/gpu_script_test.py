# SPDX-License-Identifier: Apache-2.0
#
# scripts/gpu over programs that fail as told: what it says of each failure, and that it leaves no
# daemon behind. The programs are shell scripts in a tree of the test's own; no GPU is needed.

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

BENCH = """
if [ "$1" = --lanes ]; then eval "$FIRST_BENCH"; exit; fi
eval "$BENCH"
echo '{"device": "Fake", "copy_bytes_per_second": 1e12, "kernels": []}' >"$2"
"""
# ebbtided --config FOLDER/BACKEND.yaml
DAEMON = """
trap 'exit 0' TERM
echo $$ >>"$PIDS"
touch "${2%.yaml}.ready"
while :; do sleep 0.05; done
"""
# ebbctl --socket unix:FOLDER/BACKEND.sock status | replay …
CTL = """
case "$2 $3" in
  *status) socket="${2#unix:}"; [ -e "${socket%.sock}.ready" ] || exit 1; eval "$STATUS" ;;
  */cpu.sock*) eval "$REPLAY_CPU" ;;
esac
[ "$3" = status ] || echo '{"runs": [{"policy": "h2o", "recall": "off", "certificate_violations": 0,
  "byte_mismatches": 0, "rel_error": {"p50": 0.1, "p99": 0.2}}]}'
"""


class GpuScriptTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        self.pids = self.root / "pids"
        (self.root / "scripts").mkdir()
        for name in ("gpu", "common.sh"):
            shutil.copy(ROOT / "scripts" / name, self.root / "scripts" / name)
        (self.root / "build/release/gpu/CMakeFiles/ebbtide_gpu_cuda.dir/kernels").mkdir(parents=True)
        self.program("path/cmake", "")
        self.program("build/release/bin/gpu_device_tests", "")
        self.program("build/release/bin/cuda_bench", BENCH)
        self.program("build/release/bin/ebbtided", DAEMON)
        self.program("build/release/bin/ebbctl", CTL)

    def program(self, name, body):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n" + body)
        path.chmod(0o755)

    def run_script(self, **told):
        """Its exit code, and results.json, where there is one."""
        environment = {"PATH": f"{self.root}/path:/usr/bin:/bin", "PIDS": str(self.pids),
                       "WAIT": "30", "TMPDIR": str(self.root), **told}
        run = subprocess.run([self.root / "scripts/gpu", self.root / "out"], env=environment,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60,
                             check=False)
        results = self.root / "out/results.json"
        return run.returncode, json.loads(results.read_text()) if results.exists() else None

    def assert_no_daemon_lives(self, started=None):
        """started: how many there were; none where they may have ended before they said so."""
        pids = [int(pid) for pid in self.pids.read_text().split()] if self.pids.exists() else []
        if started is not None:
            self.assertEqual(len(pids), started)
        for pid in pids:
            with self.assertRaises(ProcessLookupError):
                os.kill(pid, 0)

    def test_what_goes_well_is_told_with_both_errors(self):
        code, results = self.run_script()
        self.assertEqual((code, results["failed"]), (0, []))
        self.assertEqual(results["bench"]["device"], "Fake")
        self.assertEqual(len(results["errors"]), 1)
        self.assert_no_daemon_lives(started=2)

    def test_without_a_device_nothing_runs(self):
        self.assertEqual(self.run_script(FIRST_BENCH="exit 3"), (3, None))
        self.assertFalse(self.pids.exists())

    def test_a_benchmark_that_dies_is_a_failure_and_no_missing_device(self):
        for told in ("exit 1", "kill -SEGV $$"):
            code, results = self.run_script(FIRST_BENCH=told)
            self.assertEqual((code, results["failed"]), (1, ["device"]))
            self.assertEqual(len(results["errors"]), 1)

    def test_a_replay_that_fails_leaves_no_daemon(self):
        code, results = self.run_script(REPLAY_CPU="echo '{'; exit 1")
        self.assertEqual((code, results["failed"]), (1, ["replay-cpu"]))
        self.assertEqual(results["errors"], [])
        self.assert_no_daemon_lives(started=2)

    def test_a_daemon_that_does_not_answer_is_given_up(self):
        code, results = self.run_script(STATUS="exit 1", WAIT="1")
        self.assertEqual((code, results["failed"]), (1, ["replay-cpu", "replay-cuda"]))
        self.assert_no_daemon_lives()

    def test_a_daemon_that_does_not_end_is_killed(self):
        self.program("build/release/bin/ebbtided", DAEMON.replace("'exit 0'", "''"))
        code, results = self.run_script(WAIT="3")  # It has to answer before.
        self.assertEqual((code, results["failed"]), (0, []))
        self.assert_no_daemon_lives(started=2)

    def test_what_an_earlier_run_left_is_not_read(self):
        self.run_script()
        code, results = self.run_script(BENCH="exit 1", REPLAY_CPU="exit 1")
        self.assertEqual((code, results["failed"]), (1, ["bench", "replay-cpu"]))
        self.assertIsNone(results["bench"])
        self.assertEqual(results["errors"], [])


if __name__ == "__main__":
    unittest.main()
