//! Filesystems with several devices: the other devices are found beside the image that a command names.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;
use ubtrfs_testkit::{LoopMount, btrfs_check_array, capability, run as sh};

use crate::common::{command, ok, refused, text, ubtrfs};

/// Two image files with an empty RAID1 that Linux's tools made.
struct Array(TempDir);

impl Array {
    fn new() -> Option<Self> {
        if !capability::program("mkfs.btrfs") {
            return None;
        }
        let array = Self(TempDir::with_prefix("ubtrfs-array-").unwrap());
        for name in ["a.img", "b.img"] {
            fs::File::create(array.path(name)).unwrap().set_len(256 << 20).unwrap();
        }
        sh("mkfs.btrfs", ["-q", "-d", "raid1", "-m", "raid1", &array.at("a.img"), &array.at("b.img")]).unwrap();
        Some(array)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn at(&self, name: &str) -> String {
        text(&self.path(name))
    }
}

#[test]
fn the_other_devices_of_an_image_are_found_beside_it() {
    let Some(array) = Array::new() else { return };
    for name in ["a.img", "b.img"] {
        assert_eq!(ok(ubtrfs(["ls", &array.at(name)])), "");
        assert!(ok(ubtrfs(["check", &array.at(name)])).contains(": clean"));
        ok(ubtrfs(["device", "ready", &array.at(name)]));
        ok(ubtrfs(["inspect", "dump-tree", "-t", "chunk", &array.at(name)]));
    }
    // A device elsewhere is named by an option.
    fs::create_dir(array.path("other")).unwrap();
    fs::rename(array.path("b.img"), array.path("other/b.img")).unwrap();
    refused(&ubtrfs(["device", "ready", &array.at("a.img")]), &["only 1 of its 2 devices"]);
    let device = format!("device={}", array.at("other/b.img"));
    assert_eq!(ok(ubtrfs(["ls", "-o", &device, &array.at("a.img")])), "");
}

#[test]
fn devices_with_a_btrfs_are_told_apart() {
    let Some(array) = Array::new() else { return };
    assert_eq!(
        ok(ubtrfs(["device", "scan", &array.at("a.img")])),
        format!("Scanning for btrfs filesystems on '{}'\n", array.at("a.img"))
    );
    fs::write(array.path("text"), "no device").unwrap();
    let output = ubtrfs(["device", "scan", &array.at("text")]);
    assert!(
        !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("holds no btrfs"),
        "{output:?}"
    );
    assert_eq!(ok(ubtrfs(["device", "scan", "--forget"])), "");
}

#[test]
fn a_copy_of_a_device_beside_it_is_refused() {
    let Some(array) = Array::new() else { return };
    fs::copy(array.path("b.img"), array.path("copy.img")).unwrap();
    let words = ["b.img", "copy.img", "both device 2", "-o device="];
    refused(&ubtrfs(["ls", &array.at("a.img")]), &words);
    let device = format!("device={}", array.at("copy.img"));
    assert_eq!(ok(ubtrfs(["ls", "-o", &device, &array.at("a.img")])), "");
}

#[test]
fn a_mounted_array_goes_on_without_a_device_and_takes_it_back() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let array = Array(TempDir::with_prefix("ubtrfs-array-").unwrap());
    let [a, b, m] = ["a.img", "b.img", "m"].map(|name| array.at(name));
    fs::create_dir(array.path("m")).unwrap();
    fs::create_dir(array.path("away")).unwrap();
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", "-d", "raid1", "-m", "raid1", &a, &b]));
    let written = |name: &str| {
        fs::write(array.path("m").join(name), name.repeat(50_000)).unwrap();
        ok(ubtrfs(["umount", &m]));
    };
    let holds = |names: &[&str]| {
        for name in names {
            assert!(fs::read_to_string(array.path("m").join(name)).unwrap() == name.repeat(50_000), "{name}");
        }
    };
    ok(ubtrfs(["mount", "-o", &format!("device={a},device={b}"), &a, &b, &m]));
    assert!(ok(ubtrfs(["filesystem", "show", &m])).contains("Total devices 2"));
    ok(ubtrfs(["filesystem", "label", &b, "by the second"]));
    assert_eq!(ok(ubtrfs(["filesystem", "label", &m])), "by the second\n");
    written("whole");
    assert!(ok(ubtrfs(["check", "--check-data-csum", &a])).contains(": clean"));

    // Without a device, only reading is possible, unless the option says so.
    fs::rename(&b, array.path("away/b.img")).unwrap();
    let shown = ok(ubtrfs(["filesystem", "show", &a]));
    assert!(shown.contains("\t*** Some devices missing\n") && !shown.contains("devid    2"), "{shown}");
    let names_missing = |args: &[&str], how: &[&str]| {
        let mounted = ubtrfs(args);
        let said = String::from_utf8_lossy(&mounted.stderr).into_owned();
        assert!(mounted.status.success(), "{said}");
        let usage = format!("ubtrfs filesystem usage {m}");
        for words in ["a.img is mounted without device 2 (uuid ", &usage].iter().chain(how) {
            assert!(said.contains(words), "{words}: {said}");
        }
        assert_eq!(said.lines().count(), 1, "{said}");
    };
    names_missing(&["mount", "-r", &a, &m], &["cannot be read"]);
    holds(&["whole"]);
    ok(ubtrfs(["umount", &m]));
    names_missing(
        &["mount", "-o", "degraded", &a, &m],
        &["fewer copies", "device add DEVICE", "device remove missing"],
    );
    // As btrfs-progs shows them.
    let shown = ok(ubtrfs(["filesystem", "show", &m]));
    assert!(shown.contains("\tdevid    2 size 0 used 0 path  MISSING\n"), "{shown}");
    holds(&["whole"]);
    written("degraded");

    // The device that comes back is brought up to date, and that is said.
    fs::rename(array.path("away/b.img"), &b).unwrap();
    let mounted = ubtrfs(["mount", &b, &m]);
    let said = String::from_utf8_lossy(&mounted.stderr).into_owned();
    assert!(mounted.status.success(), "{said}");
    for words in ["b.img (device 2) missed changes: it has generation ", "is brought up to date"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    holds(&["whole", "degraded"]);
    written("again");
    assert!(ok(ubtrfs(["check", "--check-data-csum", &b])).contains(": clean"));
    let linux = LoopMount::array(&[&array.path("a.img"), &array.path("b.img")], "ro").unwrap();
    for name in ["whole", "degraded", "again"] {
        assert!(fs::read_to_string(linux.join(name)).unwrap() == name.repeat(50_000), "{name}");
    }
    linux.close().unwrap();
}

/// A backup of a device, made before the last changes, lies beside the image. The device itself is missing.
#[test]
fn a_device_that_missed_changes_is_overwritten_only_if_it_is_named() {
    if !capability::fuse() {
        return;
    }
    let Some(array) = Array::new() else { return };
    let [a, b, m, backup] = ["a.img", "b.img", "m", "old.bak"].map(|name| array.at(name));
    fs::create_dir(&m).unwrap();
    fs::copy(&b, &backup).unwrap();
    let write = |name: &str| {
        fs::write(array.path("m").join(name), name.repeat(50_000)).unwrap();
        ok(ubtrfs(["umount", &m]));
    };
    for name in ["one", "two", "three"] {
        ok(ubtrfs(["mount", &a, &b, &m]));
        write(name);
    }
    fs::create_dir(array.path("away")).unwrap();
    let before = fs::read(&backup).unwrap();
    // The backup does not count beside the device.
    assert_eq!(ok(ubtrfs(["ls", &a])), "one\nthree\ntwo\n");
    fs::rename(&b, array.path("away/b.img")).unwrap();
    let run = |options: &str| {
        let mounted = ubtrfs(["mount", "-o", options, &a, &m]);
        let said = String::from_utf8_lossy(&mounted.stderr).into_owned();
        assert!(mounted.status.success(), "{said}");
        for words in ["old.bak is not used", "missed changes", &format!("-o device={backup}"), "-o degraded"] {
            assert!(said.contains(words), "{words}: {said}");
        }
        said
    };
    assert!(run("rw").contains("is mounted read-only"));
    ok(ubtrfs(["umount", &m]));
    run("degraded");
    write("degraded");
    run("ro");
    ok(ubtrfs(["umount", &m]));
    assert!(fs::read(&backup).unwrap() == before, "nobody named it");
    for line in [&["check", &a][..], &["device", "ready", &a], &["ls", &a]] {
        let said = String::from_utf8_lossy(&ubtrfs(line).stderr).into_owned();
        assert!(said.contains("old.bak is not used"), "{line:?}: {said}");
    }
    // Its name says that it is the device.
    let said = ubtrfs(["mount", &a, &backup, &m]);
    assert!(
        said.status.success() && String::from_utf8_lossy(&said.stderr).contains("old.bak (device 2) missed changes")
    );
    write("named");
    assert!(fs::read(&backup).unwrap() != before);
    judged(&[&a, &backup]);
}

/// Both checkers find nothing.
fn judged(images: &[&String]) {
    if capability::kernel_oracle() {
        btrfs_check_array(images).unwrap();
    }
}

/// A command on `a.img` that writes leaves out the sick `b.img` beside it, if it may.
fn leaves_out(array: &Array, reason: &str) {
    let [a, b] = ["a.img", "b.img"].map(|name| array.at(name));
    let before = fs::read(&b).unwrap();
    let new = format!("{a}:/new");
    refused(&ubtrfs(["mkdir", &new]), &["b.img", reason, "-o degraded"]);
    refused(&ubtrfs(["mkdir", "-o", &format!("degraded,device={b}"), &new]), &["b.img", reason, "-o degraded"]);
    for line in [&["ls", "-o", "degraded,ro", &a][..], &["mkdir", "-o", "degraded", &new]] {
        let output = ubtrfs(line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{line:?}: {said}");
        assert!(said.contains("b.img is not used") && said.contains(reason), "{line:?}: {said}");
    }
    assert!(fs::read(&b).unwrap() == before, "{reason}");
    judged(&[&a]);
}

#[test]
fn a_found_device_that_cannot_be_used_is_left_out_of_a_degraded_filesystem() {
    // Shorter than its superblock says.
    let Some(array) = Array::new() else { return };
    let b = fs::OpenOptions::new().write(true).open(array.path("b.img")).unwrap();
    b.set_len(100 << 20).unwrap();
    leaves_out(&array, "is truncated");
    // Without a valid superblock.
    let Some(array) = Array::new() else { return };
    let b = fs::OpenOptions::new().write(true).open(array.path("b.img")).unwrap();
    for offset in [64 << 10, 64 << 20] {
        b.write_all_at(b"bad", offset + 200).unwrap();
    }
    leaves_out(&array, "no valid superblock");
    // Written apart.
    let Some(array) = Array::new() else { return };
    fs::create_dir(array.path("away")).unwrap();
    for (name, other, times) in [("a.img", "b.img", 1), ("b.img", "a.img", 2)] {
        let away = array.path("away").join(other);
        fs::rename(array.path(other), &away).unwrap();
        for n in 0..times {
            ok(ubtrfs(["mkdir", "-o", "degraded", &format!("{}:/{name}{n}", array.at(name))]));
        }
        fs::rename(away, array.path(other)).unwrap();
    }
    leaves_out(&array, "were written apart");
}

#[test]
fn a_found_device_that_refuses_writes_is_left_out_of_a_degraded_filesystem() {
    let Some(array) = Array::new() else { return };
    let [a, b] = ["a.img", "b.img"].map(|name| array.at(name));
    if sh("chattr", ["+i", &b]).is_err() {
        eprintln!("skipped: no file can be made immutable here");
        return;
    }
    let new = format!("{a}:/new");
    let outputs = [
        ubtrfs(["mkdir", &new]),
        ubtrfs(["mkdir", "-o", &format!("degraded,device={b}"), &new]),
        ubtrfs(["ls", "-o", "degraded", &a]),
        ubtrfs(["mkdir", "-o", "degraded", &new]),
    ];
    sh("chattr", ["-i", &b]).unwrap();
    let [without, named, read, degraded] = outputs;
    for output in [&without, &named] {
        refused(output, &["b.img", "immutable", "-o degraded"]);
    }
    assert!(read.status.success() && read.stderr.is_empty(), "it can be read: {read:?}");
    let said = String::from_utf8_lossy(&degraded.stderr).into_owned();
    assert!(degraded.status.success() && said.contains("b.img is not used") && said.contains("immutable"), "{said}");
    judged(&[&a]);
}

#[test]
fn an_image_and_the_loop_device_over_it_are_one_device() {
    if !capability::kernel_oracle() {
        return;
    }
    let Some(array) = Array::new() else { return };
    let [a, b] = ["a.img", "b.img"].map(|name| array.at(name));
    let loops = [&a, &b].map(|image| sh("losetup", ["-f", "--show", image]).unwrap().trim().to_owned());
    let outputs = [
        ubtrfs(["mkdir", &format!("{a}:/one")]),
        ubtrfs(["mkdir", &format!("{b}:/two")]),
        ubtrfs(["ls", &loops[0]]),
        ubtrfs(["mkdir", "-o", &format!("device={}", loops[1]), &format!("{a}:/three")]),
    ];
    for device in &loops {
        sh("losetup", ["-d", device]).unwrap();
    }
    outputs.into_iter().map(ok).for_each(drop);
    assert_eq!(ok(ubtrfs(["ls", &a])), "one\nthree\ntwo\n");
    judged(&[&a, &b]);
}

#[test]
fn of_two_mounts_at_once_by_different_devices_one_succeeds() {
    if !capability::fuse() {
        return;
    }
    let Some(array) = Array::new() else { return };
    let dirs = ["m1", "m2"].map(|name| array.at(name));
    dirs.iter().for_each(|dir| fs::create_dir(dir).unwrap());
    for round in 0..12 {
        let mounts = [("a.img", &dirs[0]), ("b.img", &dirs[1])].map(|(name, dir)| {
            let mut mount = command(["mount", &array.at(name), dir]);
            mount.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        });
        let outputs = mounts.map(|mount| mount.wait_with_output().unwrap());
        for (dir, output) in dirs.iter().zip(&outputs).filter(|(_, output)| output.status.success()) {
            assert!(fs::read_dir(dir).is_ok(), "{output:?}");
        }
        // Root can mount it twice.
        let mounted = dirs.iter().zip(&outputs).filter(|(_, output)| output.status.success());
        let results: Vec<Output> = mounted.map(|(dir, _)| ubtrfs(["umount", dir])).collect();
        assert!(!results.is_empty(), "{round}: {outputs:?}");
        results.into_iter().map(ok).for_each(drop);
        for output in outputs.iter().filter(|output| !output.status.success()) {
            refused(output, &["in use"]);
        }
    }
}

#[test]
fn a_device_of_a_mounted_array_is_refused_with_the_name_of_the_mount() {
    if !capability::fuse() {
        return;
    }
    let Some(array) = Array::new() else { return };
    let [a, b, m] = ["a.img", "b.img", "m"].map(|name| array.at(name));
    fs::create_dir(&m).unwrap();
    ok(ubtrfs(["mount", &a, &m]));
    let remedy = format!("unmount it with: ubtrfs umount {m}");
    let outputs = [&a, &b].map(|image| [ubtrfs(["ls", image]), ubtrfs(["mkfs", "-f", image])]);
    ok(ubtrfs(["umount", &m]));
    for output in outputs.iter().flatten() {
        refused(output, &["in use", &remedy]);
    }
}

#[test]
fn the_foreign_device_among_several_is_named() {
    let Some(array) = Array::new() else { return };
    let [a, b, x, m] = ["a.img", "b.img", "x.img", "m"].map(|name| array.at(name));
    fs::create_dir(&m).unwrap();
    ok(ubtrfs(["mkfs", "-q", "-b", "200M", &x]));
    let foreign = format!("{x} belongs to filesystem");
    for line in [&["mount", &a, &x, &m][..], &["mount", &x, &a, &b, &m], &["ls", "-o", &format!("device={x}"), &a]] {
        refused(&ubtrfs(line), &[&foreign, "devices of one filesystem"]);
    }
}

#[test]
fn a_remount_may_name_any_device() {
    if !capability::fuse() {
        return;
    }
    let Some(array) = Array::new() else { return };
    fs::create_dir(array.path("m")).unwrap();
    let m = array.at("m");
    ok(ubtrfs(["mount", &array.at("a.img"), &m]));
    for name in ["b.img", "a.img"] {
        for how in ["remount,ro", "remount,rw"] {
            ok(ubtrfs(["mount", "-o", how, &array.at(name), &m]));
        }
    }
    fs::copy(array.path("b.img"), array.path("copy.img")).unwrap();
    refused(&ubtrfs(["mount", "-o", "remount,ro", &array.at("copy.img"), &m]), &["a.img", "copy.img"]);
    ok(ubtrfs(["umount", &m]));
}

#[test]
fn a_resize_works_on_the_file_of_its_device_and_on_no_other() {
    let array = Array(TempDir::with_prefix("ubtrfs-array-").unwrap());
    // Names are escaped in messages.
    let [a, b] = ["a.img", "b\t.img"].map(|name| array.at(name));
    ok(ubtrfs(["mkfs", "-q", "-b", "400M", "-d", "raid1", "-m", "raid1", &a, &b]));
    let sizes = || [&a, &b].map(|path| fs::metadata(path).unwrap().len() >> 20);
    let resize = |words: &[&str]| ubtrfs(["filesystem", "resize"].iter().chain(words).copied());
    assert_eq!(ok(resize(&["2:+100M", &a])), "device 2: 419430400 -> 524288000 bytes\n");
    assert_eq!(sizes(), [400, 500]);
    assert_eq!(ok(resize(&["600M", &b])), "device 1: 419430400 -> 629145600 bytes\n");
    assert_eq!(sizes(), [600, 500]);
    fs::File::options().write(true).open(&b).unwrap().set_len(700 << 20).unwrap();
    ok(resize(&["2:+50M", &a]));
    assert_eq!(sizes(), [600, 700]);
    ok(resize(&["--truncate", "2:200M", &a]));
    assert_eq!(sizes(), [600, 200]);
    ok(resize(&["--truncate", "2:min", &a]));
    ok(resize(&["2:200M", &a]));
    assert_eq!(sizes(), [600, 200]);
    // A refused resize changes nothing.
    for words in [&["3:+100M", &a][..], &["2:+9E", &a], &["2:10M", &a], &["--truncate", "3:100M", &b]] {
        refused(&resize(words), &["device"]);
        assert_eq!(sizes(), [600, 200], "{words:?}");
    }
    // The device may lie elsewhere, and one that is missing stays missing.
    fs::create_dir(array.path("away")).unwrap();
    let away = array.at("away/b.img");
    fs::rename(&b, &away).unwrap();
    refused(&resize(&["2:+100M", &a]), &["missing", "-o degraded"]);
    assert_eq!(fs::metadata(&a).unwrap().len() >> 20, 600);
    ok(resize(&["-o", &format!("device={away}"), "2:+100M", &a]));
    assert_eq!(fs::metadata(&away).unwrap().len() >> 20, 300);
    let degraded = resize(&["-o", "degraded", "2:+100M", &a]);
    refused(&degraded, &["device 2"]);
    assert!(resize(&["-o", "degraded", "1:+10M", &a]).status.success());
    assert_eq!(fs::metadata(&a).unwrap().len() >> 20, 610);
    judged(&[&a]);
}

/// The standard output and error of a command that succeeded.
fn told(output: &Output) -> (String, String) {
    assert!(output.status.success(), "{output:?}");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// This program by the name `btrfs`.
fn as_btrfs(args: &[&str]) -> Output {
    use std::os::unix::process::CommandExt;
    command(args).arg0("btrfs").output().unwrap()
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&told(&ubtrfs(args)).0).unwrap()
}

/// An array of ubtrfs with these image files of 300 MiB.
fn made(profile: &str, names: &[&str]) -> Array {
    let array = Array(TempDir::with_prefix("ubtrfs-array-").unwrap());
    let images: Vec<String> = names.iter().map(|name| array.at(name)).collect();
    let line = ["mkfs", "-q", "-b", "300M", "-d", profile, "-m", profile].map(str::to_owned);
    ok(ubtrfs(line.iter().chain(&images)));
    for dir in ["m", "away"] {
        fs::create_dir(array.path(dir)).unwrap();
    }
    array
}

#[test]
fn a_device_that_is_not_in_sync_is_shown_as_such() {
    if !capability::fuse() {
        return;
    }
    let array = made("raid1", &["a.img", "b.img"]);
    let [a, b, m] = ["a.img", "b.img", "m"].map(|name| array.at(name));
    let squeezed = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let usage = |at: &str| squeezed(&ok(ubtrfs(["device", "usage", at])));
    assert_eq!(usage(&a).matches("Device state: in sync").count(), 2, "{}", usage(&a));
    ok(ubtrfs(["mount", &a, &m]));
    // A file that became shorter takes no more writes.
    fs::copy(&b, array.path("away/b.img")).unwrap();
    fs::File::options().write(true).open(&b).unwrap().set_len(100 << 20).unwrap();
    fs::write(array.path("m/file"), "content".repeat(50_000)).unwrap();
    ok(ubtrfs(["sync", &m]));
    assert!(usage(&m).contains("b.img, ID: 2 Device state: failed"), "{}", usage(&m));
    let shown = ok(ubtrfs(["filesystem", "show", &m]));
    assert!(shown.contains("path ") && shown.contains("b.img (failed)\n"), "{shown}");
    for words in [&["filesystem", "usage", &m][..], &["filesystem", "usage", "-T", &m]] {
        let text = ok(ubtrfs(words));
        assert!(text.contains("Device missing:\t\t 300.00MiB") && text.contains("b.img (failed)"), "{text}");
    }
    for words in [["filesystem", "show", "--json", &m], ["device", "usage", "--json", &m]] {
        let value = json(&words);
        assert_eq!(
            (&value["devices"][0]["state"], &value["devices"][1]["state"]),
            (&"in_sync".into(), &"failed".into())
        );
    }
    // btrfs-progs knows only missing devices.
    let theirs = |words: &[&str]| told(&as_btrfs(words)).0;
    let shown = theirs(&["filesystem", "show", &m]);
    assert!(shown.contains("\tdevid    2 size 0 used 0 path  MISSING\n"), "{shown}");
    let of_devices = squeezed(&theirs(&["device", "usage", &m]));
    assert!(of_devices.contains("missing, ID: 2 Device size: 0.00B"), "{of_devices}");
    assert!(!of_devices.contains("state"), "{of_devices}");
    assert!(theirs(&["filesystem", "usage", &m]).contains("   missing\t"));
    ok(ubtrfs(["umount", &m]));
    // It comes back, and a read-only mount does not bring it up to date.
    fs::rename(array.path("away/b.img"), &b).unwrap();
    for n in 0..3 {
        assert!(ubtrfs(["mkdir", "-o", "degraded", &format!("{a}:/{n}")]).status.success());
    }
    let device = format!("device={b}");
    let shown = ok(ubtrfs(["filesystem", "show", "-o", &device, &a]));
    assert!(shown.contains("b.img (missed changes)\n"), "{shown}");
    assert_eq!(json(&["device", "usage", "--json", "-o", &device, &a])["devices"][1]["state"], "behind");
}

#[test]
fn a_removed_device_that_comes_back_is_in_nobodys_way() {
    if !capability::fuse() {
        return;
    }
    let array = made("raid1", &["a.img", "b.img"]);
    let [a, b, c, m] = ["a.img", "b.img", "c.img", "m"].map(|name| array.at(name));
    fs::rename(&b, array.path("away/b.img")).unwrap();
    let said = ubtrfs(["mount", "-o", "degraded", &a, &m]);
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains("replace start missing DEVICE") && said.contains("device remove missing"), "{said}");
    fs::write(array.path("m/file"), "content").unwrap();
    fs::File::create(&c).unwrap().set_len(300 << 20).unwrap();
    ok(ubtrfs(["device", "add", &c, &m]));
    ok(ubtrfs(["device", "remove", "missing", &m]));
    ok(ubtrfs(["umount", &m]));
    fs::rename(array.path("away/b.img"), &b).unwrap();
    let before = fs::read(&b).unwrap();
    // Beside the others it is not mentioned. Named, it is left out by its name, and hides no other.
    ok(ubtrfs(["mount", &a, &m]));
    ok(ubtrfs(["umount", &m]));
    let named = ubtrfs(["mount", "-o", &format!("device={b}"), &a, &m]);
    let said = String::from_utf8_lossy(&named.stderr).into_owned();
    assert!(named.status.success() && said.contains("b.img is not used: it was removed"), "{said}");
    assert!(!said.contains("read-only"), "{said}");
    fs::write(array.path("m/more"), "content").unwrap();
    ok(ubtrfs(["umount", &m]));
    assert!(fs::read(&b).unwrap() == before);
    judged(&[&a, &c]);
}

#[test]
fn a_device_that_failed_is_removed_as_a_missing_one() {
    if !capability::fuse() {
        return;
    }
    let array = made("raid1", &["a.img", "b.img", "c.img"]);
    let [a, b, c, m] = ["a.img", "b.img", "c.img", "m"].map(|name| array.at(name));
    ok(ubtrfs(["mount", &a, &m]));
    fs::File::options().write(true).open(&c).unwrap().set_len(5 << 20).unwrap();
    fs::write(array.path("m/file"), "content".repeat(50_000)).unwrap();
    ok(ubtrfs(["sync", &m]));
    assert_eq!(ok(ubtrfs(["device", "remove", "missing", &m])), "device 3 was removed\n");
    ok(ubtrfs(["umount", &m]));
    fs::remove_file(&c).unwrap();
    judged(&[&a, &b]);
}

#[test]
fn device_usage_has_the_lines_of_btrfs_progs() {
    if !capability::kernel_oracle() {
        return;
    }
    let array = Array(TempDir::with_prefix("ubtrfs-array-").unwrap());
    let names = ["a.img", "b.img", "c.img", "d.img"];
    let images = names.map(|name| array.at(name));
    for name in names {
        fs::File::create(array.path(name)).unwrap().set_len(300 << 20).unwrap();
    }
    for profile in ["raid0", "raid10", "raid1c3", "dup"] {
        let mut words: Vec<&str> = vec!["-q", "-f", "-d", profile, "-m", "raid1"];
        words.extend(images.iter().map(String::as_str));
        sh("mkfs.btrfs", words).unwrap();
        let linux =
            LoopMount::array(&names.map(|name| array.path(name)).each_ref().map(PathBuf::as_path), "ro").unwrap();
        let theirs = sh("btrfs", ["device", "usage", &text(linux.path())]).unwrap();
        linux.close().unwrap();
        let lines = |text: &str| -> Vec<String> {
            text.lines().filter(|line| line.starts_with("   ") || line.is_empty()).map(str::to_owned).collect()
        };
        let ours = told(&as_btrfs(&["device", "usage", &images[0]])).0;
        assert_eq!(lines(&ours), lines(&theirs), "{profile}");
        let value = json(&["device", "usage", "--json", &images[0]]);
        let groups =
            value["devices"].as_array().unwrap().iter().flat_map(|device| device["groups"].as_array().unwrap());
        let kinds: Vec<_> = groups.map(|group| (group["type"].as_str(), group["profile"].as_str())).collect();
        assert!(kinds.contains(&(Some("Data"), Some(&*profile.to_uppercase()))), "{value}");
        assert_eq!(value["devices"], json(&["filesystem", "show", "--json", &images[0]])["devices"]);
    }
}

/// Some block groups are converted, and others are not.
#[test]
fn several_profiles_are_warned_of_in_the_words_of_btrfs_progs() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let array = made("single", &["a.img", "b.img"]);
    let [a, b] = ["a.img", "b.img"].map(|name| array.path(name));
    let linux = LoopMount::array(&[&a, &b], "").unwrap();
    let point = text(linux.path());
    fs::write(linux.join("file"), vec![1; 200 << 20]).unwrap();
    sh("btrfs", ["filesystem", "sync", &point]).unwrap();
    sh("btrfs", ["balance", "start", "-dconvert=raid1,limit=1", &point]).unwrap();
    let theirs = |words: &[&str]| {
        let output = std::process::Command::new("btrfs").args(words).arg(&point).output().unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    let expected = [&["filesystem", "df"][..], &["device", "usage"]].map(theirs);
    linux.close().unwrap();
    assert!(expected[0].contains("Data: single, raid1"), "{expected:?}");
    let image = text(&a);
    assert_eq!(told(&as_btrfs(&["filesystem", "df", &image])).1, expected[0]);
    assert_eq!(told(&as_btrfs(&["device", "usage", &image])).1, expected[1]);
}

#[test]
fn each_command_takes_the_remedies_that_it_names() {
    if !capability::fuse() {
        return;
    }
    let array = made("raid1", &["a.img", "b.img"]);
    let [a, b, away] = ["a.img", "b.img", "away/b.img"].map(|name| array.at(name));
    fs::rename(&b, &away).unwrap();
    let named = format!("device={away}");
    for line in [
        &["filesystem", "resize", "-o", &named, "2:+10M", &a][..],
        &["filesystem", "trim", "-o", &named, "-o", "64K", &a],
        &["filesystem", "trim", "--options", &named, &a],
        &["device", "ready", "-o", &named, &a],
        &["check", "-o", &named, &a],
        &["check", &a, &away],
    ] {
        ok(ubtrfs(line));
    }
    refused(&ubtrfs(["device", "ready", &a]), &["only 1 of its 2 devices"]);
    for line in [
        &["filesystem", "resize", "-o", "degraded", "+10M", &a][..],
        &["filesystem", "trim", "-o", "degraded", &a],
        &["device", "ready", "-o", "degraded", &a],
        &["check", "-o", "degraded", &a],
    ] {
        assert!(ubtrfs(line).status.success(), "{line:?}");
    }
    refused(&ubtrfs(["filesystem", "trim", "-o", "5x", &a]), &["'5x' is not a size"]);
    // A check does not bring the device up to date.
    for n in 0..3 {
        assert!(ubtrfs(["mkdir", "-o", "degraded", &format!("{a}:/{n}")]).status.success());
    }
    fs::rename(&away, &b).unwrap();
    let checked = ubtrfs(["check", &a]);
    let said = String::from_utf8_lossy(&checked.stderr).into_owned();
    for words in ["b.img is not used", "-o device=", "name it after the image"] {
        assert!(said.contains(words), "{words}: {said}");
    }
}

#[test]
fn a_device_of_another_owner_is_named_and_not_taken() {
    if !capability::root() {
        return;
    }
    let array = made("raid1", &["a.img", "b.img"]);
    let [a, b] = ["a.img", "b.img"].map(|name| array.at(name));
    std::os::unix::fs::chown(&b, Some(65534), None).unwrap();
    let said = told(&ubtrfs(["ls", &a])).1;
    for words in ["b.img is not used", "user 65534", "owner of the named image", &format!("-o device={b}")] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert_eq!(ok(ubtrfs(["ls", "-o", &format!("device={b}"), &a])), "");
    // A copy of a device that is there is of no interest.
    std::os::unix::fs::chown(&b, Some(0), None).unwrap();
    fs::copy(&b, array.path("copy.img")).unwrap();
    std::os::unix::fs::chown(array.path("copy.img"), Some(65534), None).unwrap();
    assert_eq!(ok(ubtrfs(["ls", &a])), "");
}

#[test]
fn all_missing_devices_are_named_if_too_many_are_lost() {
    let array = made("raid10", &["a.img", "b.img", "c.img", "d.img"]);
    let shown = json(&["filesystem", "show", "--json", &array.at("a.img")]);
    let uuid = |index: usize| shown["devices"][index]["uuid"].as_str().unwrap().to_owned();
    let lost = [format!("device 1 (uuid {})", uuid(0)), format!("device 2 (uuid {})", uuid(1))];
    for name in ["a.img", "b.img"] {
        fs::rename(array.path(name), array.path("away").join(name)).unwrap();
    }
    for options in ["ro", "degraded"] {
        let output = ubtrfs(["ls", "-o", options, &array.at("c.img")]);
        refused(&output, &["2 of its 4 devices were given", &lost[0], &lost[1]]);
    }
}

#[test]
fn a_shortened_device_that_missed_changes_is_filled_again() {
    if !capability::fuse() {
        return;
    }
    let array = made("raid1", &["a.img", "b.img"]);
    let [a, b, m] = ["a.img", "b.img", "m"].map(|name| array.at(name));
    fs::rename(&b, array.path("away/b.img")).unwrap();
    for n in 0..3 {
        assert!(ubtrfs(["mkdir", "-o", "degraded", &format!("{a}:/{n}")]).status.success());
    }
    fs::rename(array.path("away/b.img"), &b).unwrap();
    fs::File::options().write(true).open(&b).unwrap().set_len(100 << 20).unwrap();
    let remedy = format!("truncate -s 314572800 {b}");
    refused(&ubtrfs(["ls", "-o", &format!("device={b}"), &a]), &["is truncated", &remedy, "then name it (-o device=)"]);
    sh("truncate", ["-s", "314572800", &b]).unwrap();
    assert!(ubtrfs(["mount", &a, &b, &m]).status.success());
    assert!(ubtrfs(["scrub", "start", "-B", &m]).status.success());
    ok(ubtrfs(["umount", &m]));
    judged(&[&a, &b]);
}
