//! Tests of `bench run` with every workload except `send` and `receive`, in tiny sizes: on an image, and on a directory
//! if the workload needs no subvolumes. The tests check the shape of the output and its counts, never times.

use std::process::Command;

use serde_json::Value;

/// Workloads, each with its sizes and the number of operations that the result must have (0 means any number).
const RUNS: &[(&str, &[&str], u64)] = &[
    ("untar", &["--files", "120"], 0),
    ("fsmark", &["--files", "200", "--threads", "4", "--dirs", "3"], 200),
    ("rm", &["--files", "120"], 0),
    ("find", &["--files", "120"], 0),
    ("seqwrite", &["--bytes", "3m", "--block", "1m"], 3),
    ("seqread", &["--bytes", "3m", "--block", "1m"], 3),
    ("randwrite", &["--bytes", "1m", "--threads", "2"], 256),
    ("randread", &["--bytes", "1m", "--threads", "2", "--ops", "100"], 100),
    ("fsync", &["--ops", "4", "--threads", "2"], 4),
    ("database", &["--bytes", "1m", "--ops", "40", "--threads", "4", "--busy", "2"], 40),
    ("mixed", &["--ops", "400", "--threads", "2"], 400),
];

/// Workloads that need subvolumes, in the form of [`RUNS`].
const SUBVOLUME_RUNS: &[(&str, &[&str], u64)] = &[
    ("snapshot", &["--bytes", "8m", "--ops", "2"], 2),
    ("balance", &["--source", concat!(env!("CARGO_MANIFEST_DIR"), "/src"), "--ops", "2", "--quotas"], 1),
    ("balance", &["--source", concat!(env!("CARGO_MANIFEST_DIR"), "/src"), "--ops", "1", "--balance", "dup"], 1),
    ("overwrite", &["--bytes", "1m", "--quotas"], 256),
];

fn bench(args: &[&str], target: &[&str]) -> Value {
    let output =
        Command::new(env!("CARGO_BIN_EXE_bench")).arg("run").arg("--warm").args(args).args(target).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?} {target:?}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn check(result: &Value, workload: &str, ops: u64) {
    assert_eq!(result["workload"], workload, "{result}");
    assert!(ops == 0 || result["ops"] == ops, "{result}");
    assert!(result["ops"].as_u64().unwrap() > 0, "{result}");
    for key in ["seconds", "ops_per_second", "mib_per_second", "peak_rss_mib"] {
        assert!(result[key].is_f64(), "{key}: {result}");
    }
    for key in ["user", "system", "server_user", "server_system", "kernel_threads"] {
        assert!(result["cpu"][key].is_f64(), "{key}: {result}");
    }
    let latency = &result["latency"];
    let micros = |key: &str| latency[key].as_f64().unwrap();
    assert!(micros("p50_us") <= micros("p99_us") && micros("p999_us") <= micros("max_us") * 1.01, "{result}");
}

#[test]
fn every_workload_runs_on_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    for (workload, sizes, ops) in RUNS {
        let args = [&[*workload], *sizes].concat();
        check(&bench(&args, &["--dir", dir.path().to_str().unwrap()]), workload, *ops);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{workload} left something behind");
    }
}

#[test]
fn every_workload_runs_on_an_image() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    for (workload, sizes, ops) in RUNS.iter().chain(SUBVOLUME_RUNS) {
        let args = [&[*workload, "--no-import", "--create", "512m"], *sizes].concat();
        let result = bench(&args, &["--engine", image.to_str().unwrap()]);
        check(&result, workload, *ops);
        assert!(result["engine"]["ubtrfs_phase_seconds_count commit"].is_f64(), "{result}");
    }
    if ubtrfs_testkit::capability::program("btrfs") {
        ubtrfs_testkit::btrfs_check(&image).unwrap();
    }
}

#[test]
fn errors_are_one_line() {
    let run = |args: &[&str]| Command::new(env!("CARGO_BIN_EXE_bench")).arg("run").args(args).output().unwrap();
    for (args, says) in [
        (&["fsmark", "--dir", "/nonexistent/dir"][..], "/nonexistent/dir"),
        (&["fsmark", "--engine", "/nonexistent/image"], "does not exist"),
        (&["untar", "--dir", "/tmp", "--tar", "/nonexistent.tar"], "/nonexistent.tar"),
    ] {
        let output = run(args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(says) && error.lines().count() == 1, "{args:?}: {error}");
    }
}

#[test]
fn limits_of_the_machine_are_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(["limits", "--bytes", "4m", "-n", "1", "--warm", "--scratch"])
        .arg(dir.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let limits: Value = serde_json::from_slice(&output.stdout).unwrap();
    for name in ["memory_copy", "crc32c", "file_write", "file_read"] {
        assert!(limits[format!("{name}_mib_per_second")].as_f64().unwrap() > 0.0, "{limits}");
    }
    assert!(limits["machine"]["kernel"].is_string(), "{limits}");
}
