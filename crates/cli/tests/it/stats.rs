//! Tests of `ubtrfs stats` and `mount --timeline`, on a mount and on its image afterwards.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use ubtrfs_testkit::{Image, capability};

use crate::common;

fn ubtrfs<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_ubtrfs")).args(args).env("LC_ALL", "C").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn stats(target: &Path, form: &str) -> String {
    ubtrfs([OsStr::new("stats"), form.as_ref(), target.as_os_str()])
}

/// Returns the number `name`. With `label`, the number is taken from the object in `list` that has this label.
fn value(stats: &Value, list: &str, label: Option<(&str, &str)>, name: &str) -> f64 {
    let object = match label {
        None => stats,
        Some((label, own)) => stats[list].as_array().unwrap().iter().find(|object| object[label] == own).unwrap(),
    };
    object[name].as_f64().unwrap()
}

#[test]
fn a_mount_and_its_image_show_their_numbers() {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let (dir, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let timeline = out.path().join("timeline.json");
    let arg = |path: &Path| path.to_str().unwrap().to_owned();
    ubtrfs(["mount", "-o", "noio_uring", "--timeline", &arg(&timeline), &arg(image.path()), &arg(dir.path())]);
    for index in 0..500 {
        std::fs::write(dir.path().join(format!("file-{index}")), vec![1; 3000]).unwrap();
    }
    ubtrfs(["sync", &arg(dir.path())]);
    let samples: Value = serde_json::from_str(&stats(dir.path(), "--json")).unwrap();
    assert!(value(&samples, "phases", Some(("phase", "commit")), "seconds_count") >= 1.0);
    assert!(value(&samples, "trees", Some(("tree", "subvolume")), "items_put") >= 4.0 * 500.0);
    assert!(value(&samples, "", None, "dir_index_items") >= 500.0);
    assert!(value(&samples, "", None, "fuse_io_uring") < 0.5);
    let text = stats(dir.path(), "--prometheus");
    assert!(
        text.starts_with("# HELP ubtrfs_")
            && text.contains("\nubtrfs_phase_seconds_bucket{phase=\"commit\",le=\"+Inf\"} ")
    );
    let shown = ubtrfs(["stats", &arg(dir.path())]);
    assert!(shown.contains("leaf_fill") && shown.contains("write_nodes"), "{shown}");
    ubtrfs(["umount", &arg(dir.path())]);

    let events = std::fs::read_to_string(&timeline).unwrap();
    // After a clean unmount the list is closed.
    let events: Value = serde_json::from_str(&events).unwrap();
    assert!(events.as_array().unwrap().iter().any(|event| event["name"] == "commit" && event["ph"] == "X"), "{events}");

    let samples: Value = serde_json::from_str(&stats(image.path(), "--json")).unwrap();
    let of_files = Some(("id", "5"));
    assert_eq!(value(&samples, "trees", of_files, "dir_index_items"), 500.0);
    assert!((0.5..=1.0).contains(&value(&samples, "trees", of_files, "leaf_fill")));
    assert_eq!(value(&samples, "trees", of_files, "damaged_blocks"), 0.0);
    assert!(ubtrfs(["stats", &arg(image.path())]).contains("fs tree"));

    let output = Command::new(env!("CARGO_BIN_EXE_ubtrfs")).args(["stats", &arg(out.path())]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("in a mount of ubtrfs"), "{error}");
}

#[test]
fn top_shows_requests_and_space_until_it_is_ended() {
    if !capability::fuse() || !capability::program("python3") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (image, at) = (dir.path().join("a.img"), dir.path().join("mnt"));
    std::fs::create_dir(&at).unwrap();
    ubtrfs(["mkfs", "-q", "-b", "256M", image.to_str().unwrap()]);
    ubtrfs([OsStr::new("mount"), image.as_os_str(), at.as_os_str()]);
    // Each look asks for the socket's name. The first one has no interval before it.
    let steps = [("ubtrfs", ""), ("metadata", ""), ("getxattr", ""), ("us", "q")];
    common::ok(common::on_terminal(dir.path(), &["top", "-d", "0.2", "mnt"], &steps));
    let without = common::ubtrfs([OsStr::new("top"), at.as_os_str()]);
    common::refused(&without, &["needs a terminal", "ubtrfs stats --json"]);
    let wrong = common::ubtrfs([OsStr::new("top"), OsStr::new("-d"), OsStr::new("0"), at.as_os_str()]);
    assert!(!wrong.status.success() && String::from_utf8_lossy(&wrong.stderr).contains("0.1 to 3600"), "{wrong:?}");
    ubtrfs([OsStr::new("umount"), at.as_os_str()]);
}
