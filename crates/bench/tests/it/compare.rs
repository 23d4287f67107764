//! Tests of `bench compare` with tiny runs on real mounts. The tests check the shape of the output but not times. They
//! also check that no mounts, loop devices or files remain, even after a signal.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const TINY: &[&str] = &["--warm", "--image-size", "1g", "--files", "200", "--bytes", "2m", "--ops", "20"];

/// Whether this machine has root, loop devices, FUSE and the program `ubtrfs`.
fn capable() -> bool {
    let program = Path::new(env!("CARGO_BIN_EXE_bench")).with_file_name("ubtrfs");
    if !ubtrfs_testkit::capability::kernel_oracle() || !ubtrfs_testkit::capability::fuse() {
        return false;
    }
    if !program.exists() {
        assert!(!ubtrfs_testkit::capability::in_ci(), "CI needs {}", program.display());
        eprintln!("SKIPPED: this test needs {}; build the workspace", program.display());
        return false;
    }
    true
}

/// Mounts, loop devices and files below `scratch`. Waits a moment for loop devices that are detached but still open in a
/// process that looks at all devices.
fn left_behind(scratch: &Path) -> Vec<String> {
    let started = Instant::now();
    loop {
        let found = left_now(scratch);
        if found.is_empty() || started.elapsed() > Duration::from_secs(10) {
            return found;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn left_now(scratch: &Path) -> Vec<String> {
    let name = scratch.to_str().unwrap();
    let mut found: Vec<String> = Vec::new();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    found.extend(mounts.lines().filter(|line| line.contains(name)).map(str::to_owned));
    let loops = ubtrfs_testkit::run("losetup", ["-a"]).unwrap();
    found.extend(loops.lines().filter(|line| line.contains(name)).map(str::to_owned));
    found.extend(std::fs::read_dir(scratch).unwrap().map(|entry| entry.unwrap().path().display().to_string()));
    found
}

#[test]
fn all_sides_are_compared() {
    if !capable() {
        return;
    }
    let (scratch, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (json, svg) = (out.path().join("json"), out.path().join("svg"));
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(["compare", "untar", "rm", "randwrite", "fsmark", "-n", "2", "--check", "--memory-limit", "128m"])
        .args(TINY)
        .args(["--scratch".as_ref(), scratch.path(), "--json".as_ref(), &json, "--svg".as_ref(), &svg])
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let table = String::from_utf8(output.stdout).unwrap();
    let (rows, requests): (Vec<&str>, Vec<&str>) = table.lines().partition(|line| line.starts_with('|'));
    assert_eq!((rows.len(), requests.len()), (2 + 4 * 4, 4 * 2), "{table}");
    assert!(requests.iter().all(|line| line.contains(" requests an operation: ")), "{table}");
    let results: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(results["runs"].as_array().unwrap().len(), 4 * 4 * 2);
    let summary = results["summary"].as_array().unwrap();
    assert_eq!(summary.len(), 4 * 4);
    for row in summary {
        let ratio = row["to_linux"].as_f64().unwrap();
        assert!(row["runs"] == 2 && ratio > 0.0 && (row["side"] != "linux" || ratio == 1.0), "{row}");
    }
    for run in results["runs"].as_array().unwrap() {
        let ops = run["result"]["ops"].as_u64().unwrap();
        assert!(run["workload"] != "fsmark" || ops == 200, "{run}");
        assert_eq!(run["memory_limit"].is_null(), run["workload"] != "randwrite", "{run}");
        assert_eq!(run["result"]["through"] == "import", run["workload"] == "untar" && run["side"] == "engine");
    }
    let plot = std::fs::read_to_string(&svg).unwrap();
    assert!(plot.starts_with("<svg") && plot.trim_end().ends_with("</svg>") && plot.matches("<title>").count() == 16);
    assert_eq!(left_behind(scratch.path()), Vec::<String>::new());
}

#[test]
fn arrays_are_compared_also_without_a_device() {
    if !capable() {
        return;
    }
    for (profile, nr_devices, degraded) in [("raid0", "2", false), ("raid1", "2", true), ("raid10", "4", true)] {
        let scratch = tempfile::tempdir().unwrap();
        let mut compare = Command::new(env!("CARGO_BIN_EXE_bench"));
        compare
            .args(["compare", "seqread", "fsmark", "-n", "1", "--sides", "engine,mount,linux", "--check"])
            .args(TINY);
        compare.args(["--devices", nr_devices, "--data", profile, "--metadata", "raid1"]);
        compare.args(degraded.then_some("--degraded")).arg("--scratch").arg(scratch.path());
        let output = compare.output().unwrap();
        assert!(output.status.success(), "{profile}: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(left_behind(scratch.path()), Vec::<String>::new());
    }
}

#[test]
fn a_signal_leaves_nothing_behind() {
    if !capable() {
        return;
    }
    for side in ["mount", "linux", "null"] {
        let scratch = tempfile::tempdir().unwrap();
        let mut compare = Command::new(env!("CARGO_BIN_EXE_bench"))
            .args(["compare", "fsmark", "--warm", "--image-size", "1g", "--files", "100000000", "--sides", side])
            .arg("--scratch")
            .arg(scratch.path())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let started = Instant::now();
        let mounted =
            || std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains(scratch.path().to_str().unwrap());
        while !mounted() {
            assert!(started.elapsed() < Duration::from_secs(60), "{side} was not mounted");
            assert!(compare.try_wait().unwrap().is_none(), "{side} ended");
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_millis(300));
        ubtrfs_testkit::run("kill", ["-TERM", &compare.id().to_string()]).unwrap();
        let error = std::io::read_to_string(compare.stderr.take().unwrap()).unwrap();
        assert!(!compare.wait().unwrap().success());
        assert!(error.contains("interrupted") && !error.contains("cleaning up"), "{side}: {error}");
        assert_eq!(left_behind(scratch.path()), Vec::<String>::new(), "{side}");
    }
}
