//! Tests that every example succeeds.

use std::path::Path;
use std::process::Command;

fn run(example: &str, args: &[&str]) -> String {
    let output = Command::new(ubtrfs_testkit::build_example(example).unwrap()).args(args).output().unwrap();
    assert!(output.status.success(), "{example}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_example_runs() {
    let scratch = tempfile::tempdir().unwrap();
    let image = scratch.path().join("disk.img");
    let image = image.to_str().unwrap();
    assert!(run("make_image", &[image]).contains("bytes are free"));
    ubtrfs_testkit::second_opinion(Path::new(image)).unwrap();
    let walked = run("walk", &[image]);
    assert!(walked.contains("\"/root/home/alice/notes\""), "{walked}");
    let kept = run("snapshot", &[]);
    assert!(kept.contains("day-5: what happened on day 5") && !kept.contains("day-2:"), "{kept}");
    // The inodes are 1,000 files and the root directories of the top level and of the data
    // relocation tree.
    assert!(run("own_device", &[]).contains("1002 inodes"));
}
