//! `device add`, `device remove` and `replace`: on images and mounts, also missing devices, and what is refused.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use tempfile::TempDir;
use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::DevId;
use ubtrfs_fs::{Fs, Job, MountOptions, ReplaceRequest};
use ubtrfs_testkit::{LoopDevice, LoopMount, btrfs_check_array, capability, run as sh};

use crate::common::{ok, refused, text, ubtrfs};

/// Image files of one filesystem, and new ones.
struct Bed(TempDir);

impl Bed {
    fn new() -> Self {
        let bed = Self(TempDir::with_prefix("ubtrfs-devices-").unwrap());
        fs::create_dir(bed.path("m")).unwrap();
        bed
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn at(&self, name: &str) -> String {
        text(&self.path(name))
    }

    /// Makes an empty image file.
    fn blank(&self, name: &str, mib: u64) -> String {
        fs::File::create(self.path(name)).unwrap().set_len(mib << 20).unwrap();
        self.at(name)
    }

    fn write(&self, name: &str) {
        fs::write(self.path("m").join(name), name.repeat(2_000_000)).unwrap();
    }

    /// Lets Linux check, mount and scrub the images, and compare the files.
    fn judge(&self, images: &[&str], files: &[&str]) {
        let paths: Vec<PathBuf> = images.iter().map(|image| self.path(image)).collect();
        let refs: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
        let linux = LoopMount::array(&refs, "").unwrap();
        for name in files {
            assert!(fs::read_to_string(linux.join(name)).unwrap() == name.repeat(2_000_000), "{name}");
        }
        // Linux scrubs no seed.
        if !images.contains(&"seed.img") {
            linux.scrub().unwrap();
        }
        linux.close().unwrap();
    }
}

#[test]
fn devices_join_and_leave_an_image_that_is_not_mounted() {
    let bed = Bed::new();
    let [a, b, c] = ["a.img", "b.img", "c.img"].map(|name| bed.at(name));
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", &a]));
    refused(&ubtrfs(["device", "add", &b, &a]), &["b.img does not exist", "truncate -s SIZE"]);
    bed.blank("b.img", 256);
    bed.blank("c.img", 300);
    assert_eq!(ok(ubtrfs(["device", "add", &b, &a])), format!("{b} is device 2 now, with 256.00MiB\n"));
    // Any device names the filesystem.
    let added: Value = serde_json::from_str(&ok(ubtrfs(["device", "add", "--json", &c, &b]))).unwrap();
    assert_eq!((&added[0]["devid"], &added[0]["size_bytes"]), (&Value::from(3), &Value::from(300 << 20)));
    ok(ubtrfs(["balance", "start", "-f", "-dconvert=raid1", "-mconvert=raid1", &a]));
    assert!(ok(ubtrfs(["check", &a])).contains(": clean"));
    refused(&ubtrfs(["device", "remove", "1", "2", &a]), &["RAID1 needs 2 devices, and only 1 would be left"]);
    refused(&ubtrfs(["device", "remove", "missing", &a]), &["no further device", "is missing"]);
    refused(&ubtrfs(["device", "remove", "9", &a]), &["there is no device 9", "ubtrfs filesystem show"]);
    refused(&ubtrfs(["device", "remove", &bed.at("m"), &a]), &["is no device of"]);
    refused(&ubtrfs(["device", "remove", "cancel", &a]), &["no removal of a device is running"]);
    refused(&ubtrfs(["device", "remove", "cancel", "1", &a]), &["give it alone"]);
    assert_eq!(ok(ubtrfs(["device", "remove", &a, &b])), "device 1 was removed\n");
    refused(&ubtrfs(["ls", &a]), &["not a btrfs filesystem"]);
    assert!(ok(ubtrfs(["check", &b])).contains(": clean"));
    // What it held is known, so that nothing is overwritten by mistake.
    refused(&ubtrfs(["device", "add", &c, &b]), &["c.img is a device of this filesystem already"]);
    bed.blank("twice.img", 64);
    refused(&ubtrfs(["device", "add", &bed.at("twice.img"), &bed.at("twice.img"), &b]), &["is given twice"]);
    fs::write(bed.path("precious"), "no zeros".repeat(5_000_000)).unwrap();
    refused(&ubtrfs(["device", "add", &bed.at("precious"), &b]), &["is a file with content", "use -f"]);
    assert!(fs::read_to_string(bed.path("precious")).unwrap().starts_with("no zeros"));
    ok(ubtrfs(["mkfs", "-q", &a]));
    refused(&ubtrfs(["device", "add", &a, &b]), &["contains a btrfs filesystem", "use -f"]);
    ok(ubtrfs(["device", "add", "-f", "-K", &a, &b]));
    assert!(ok(ubtrfs(["check", &b])).contains(": clean"));
}

#[test]
fn devices_join_and_leave_a_mount() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let bed = Bed::new();
    let [a, b, c, m] = ["a.img", "b.img", "c.img", "m"].map(|name| bed.at(name));
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", "-d", "raid1", "-m", "raid1", &a, &b]));
    bed.blank("c.img", 256);
    ok(ubtrfs(["mount", "--no-sandbox", &a, &m]));
    bed.write("before");
    ok(ubtrfs(["device", "add", &c, &m]));
    bed.write("after");
    bed.blank("m/inside.img", 256);
    refused(&ubtrfs(["device", "add", &bed.at("m/inside.img"), &m]), &["the filesystem itself"]);
    fs::remove_file(bed.path("m/inside.img")).unwrap();
    assert!(ok(ubtrfs(["filesystem", "show", &m])).contains("Total devices 3"));
    // A device of the mount can be named in place of it.
    ok(ubtrfs(["device", "remove", &b, &m]));
    assert!(ok(ubtrfs(["device", "stats", &c])).contains("c.img"));
    bed.write("later");
    ok(ubtrfs(["umount", &m]));
    bed.judge(&["a.img", "c.img"], &["before", "after", "later"]);

    // A device is lost: another one takes its place.
    fs::rename(&a, bed.path("m/lost")).unwrap();
    fs::remove_file(bed.path("m/lost")).unwrap();
    bed.blank("d.img", 256);
    let degraded = ubtrfs(["mount", "--no-sandbox", "-o", "degraded", &c, &m]);
    let told = String::from_utf8_lossy(&degraded.stderr).into_owned();
    assert!(degraded.status.success() && told.contains("mounted without device 1"), "{degraded:?}");
    refused(&ubtrfs(["device", "remove", "missing", &m]), &["RAID1 needs 2 devices"]);
    ok(ubtrfs(["device", "add", &bed.at("d.img"), &m]));
    assert_eq!(ok(ubtrfs(["device", "remove", "missing", &m])), "device 1 was removed\n");
    bed.write("restored");
    ok(ubtrfs(["umount", &m]));
    ok(ubtrfs(["mount", &bed.at("d.img"), &m]));
    ok(ubtrfs(["umount", &m]));
    bed.judge(&["c.img", "d.img"], &["before", "after", "later", "restored"]);
}

#[test]
fn a_confined_server_takes_no_device_and_says_what_to_do() {
    if !capability::fuse() {
        return;
    }
    let bed = Bed::new();
    let [a, b, m] = ["a.img", "b.img", "m"].map(|name| bed.at(name));
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", &a]));
    bed.blank("b.img", 256);
    ok(ubtrfs(["mount", "--sandbox", &a, &m]));
    let output = ubtrfs(["device", "add", &b, &m]);
    let replaced = ubtrfs(["replace", "start", "-B", "1", &b, &m]);
    ok(ubtrfs(["umount", &m]));
    refused(&output, &["the server is confined", "unmount the filesystem, add the device to its image"]);
    refused(&output, &[&format!("`ubtrfs device add {b} {a}`")]);
    refused(
        &replaced,
        &["unmount the filesystem, replace the device in its image", &format!("`ubtrfs replace start 1 {b} {a}`")],
    );
    ok(ubtrfs(["device", "add", &b, &a]));
    assert!(ok(ubtrfs(["check", &a])).contains(": clean"));
}

#[test]
fn a_device_that_was_removed_but_keeps_its_superblock_does_not_disturb() {
    let bed = Bed::new();
    let [a, b, copy] = ["a.img", "b.img", "m/copy"].map(|name| bed.at(name));
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", "-d", "single", "-m", "single", &a, &b]));
    // As after a power cut between the superblocks of the commit and the wipe.
    fs::copy(&b, &copy).unwrap();
    ok(ubtrfs(["device", "remove", "2", &a]));
    fs::rename(&copy, &b).unwrap();
    assert_eq!(ok(ubtrfs(["ls", &a])), "");
    assert!(ok(ubtrfs(["filesystem", "show", &a])).contains("Total devices 1"));
    sh("btrfs", ["check", &a]).unwrap();
}

#[test]
fn a_device_of_an_image_is_replaced() {
    let bed = Bed::new();
    let [a, b, c] = ["a.img", "b.img", "c.img"].map(|name| bed.at(name));
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", "-d", "raid1", "-m", "raid1", &a, &b]));
    fs::write(bed.path("file"), "content".repeat(500_000)).unwrap();
    ok(ubtrfs(["cp", &bed.at("file"), &format!("{a}:/file")]));
    assert_eq!(ok(ubtrfs(["replace", "status", &a])), "Never started\n");
    refused(&ubtrfs(["replace", "start", "1", &c, &a]), &["c.img does not exist", "truncate -s SIZE"]);
    bed.blank("c.img", 200);
    refused(&ubtrfs(["replace", "start", "1", &c, &a]), &["give a larger device"]);
    refused(&ubtrfs(["replace", "start", "7", &c, &a]), &["there is no device 7"]);
    refused(&ubtrfs(["replace", "start", "missing", &c, &a]), &["no further device", "is missing"]);
    bed.blank("c.img", 300);
    assert_eq!(ok(ubtrfs(["replace", "start", &b, &c, &a])), format!("{c} has taken the place of {b}\n"));
    let status = ok(ubtrfs(["replace", "status", "-1", &c]));
    assert!(status.starts_with("Started on ") && status.contains(", finished on "), "{status}");
    assert!(status.ends_with(", 0 write errs, 0 uncorr. read errs\n"), "{status}");
    let json: Value = serde_json::from_str(&ok(ubtrfs(["replace", "status", "--json", &c]))).unwrap();
    assert_eq!((&json["state"], &json["devid"]), (&Value::from("finished"), &Value::from(2)));
    refused(&ubtrfs(["ls", &b]), &["not a btrfs filesystem"]);
    assert!(ok(ubtrfs(["check", "--check-data-csum", &a])).contains(": clean"));
    let cancel = ubtrfs(["replace", "cancel", &a]);
    assert_eq!(cancel.status.code(), Some(2), "{cancel:?}");
    // The new device can be used as a whole.
    ok(ubtrfs(["filesystem", "resize", "2:max", &a]));
    fs::remove_file(&a).unwrap();
    assert_eq!(ok(ubtrfs(["cat", &format!("{c}:/file")])).len(), 3_500_000);
    bed.blank("d.img", 256);
    let json = ok(ubtrfs(["replace", "start", "--json", "-o", "degraded", "missing", &bed.at("d.img"), &c]));
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["uncorrectable_errors"], Value::from(0), "{json}");
    assert!(ok(ubtrfs(["check", "--check-data-csum", &c])).contains(": clean"));
}

#[test]
fn a_device_of_a_mount_is_replaced_in_the_background() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let bed = Bed::new();
    let [a, b, c, m] = ["a.img", "b.img", "c.img", "m"].map(|name| bed.at(name));
    ok(ubtrfs(["mkfs", "-q", "-b", "300M", "-d", "raid1", "-m", "raid1", &a, &b]));
    bed.blank("c.img", 300);
    ok(ubtrfs(["mount", "--no-sandbox", &a, &m]));
    bed.write("before");
    assert_eq!(ok(ubtrfs(["replace", "start", &a, &c, &m])), "");
    bed.write("meanwhile");
    let status = ok(ubtrfs(["replace", "status", &m]));
    assert!(status.lines().last().unwrap().contains(", finished on "), "{status}");
    ok(ubtrfs(["umount", &m]));
    bed.judge(&["b.img", "c.img"], &["before", "meanwhile"]);
    // Linux shows what we did.
    let linux = LoopMount::array(&[&bed.path("b.img"), &bed.path("c.img")], "").unwrap();
    let theirs = sh("btrfs", ["replace", "status", "-1", linux.path().to_str().unwrap()]).unwrap();
    linux.close().unwrap();
    assert!(theirs.contains("finished on") && theirs.contains("0 write errs, 0 uncorr. read errs"), "{theirs}");
    assert_eq!(ok(ubtrfs(["replace", "status", "-1", &b])), theirs);
}

/// Without `--enqueue`, a second replacement is refused. With it, the command returns when its own one has begun.
#[test]
fn an_enqueued_replacement_waits_for_the_running_one() {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    let bed = Bed::new();
    let [a, b, m] = ["a.img", "b.img", "m"].map(|name| bed.at(name));
    ok(ubtrfs(["mkfs", "-q", "-b", "500M", "-d", "raid1", "-m", "raid1", &a, &b]));
    let [c, d] = ["c.img", "d.img"].map(|name| bed.blank(name, 500));
    ok(ubtrfs(["mount", "--no-sandbox", &a, &m]));
    for name in ["one", "two", "three", "four", "five", "six", "seven"] {
        bed.write(&name.repeat(4));
    }
    ok(ubtrfs(["sync", &m]));
    ok(ubtrfs(["replace", "start", "1", &c, &m]));
    ok(ubtrfs(["replace", "start", "--enqueue", "-B", "2", &d, &m]));
    let status = ok(ubtrfs(["replace", "status", "-1", &m]));
    assert!(status.contains("finished on"), "{status}");
    ok(ubtrfs(["umount", &m]));
    bed.judge(&["c.img", "d.img"], &["oneoneoneone", "sevensevensevenseven"]);
}

/// Begins to replace device 1 by another one, and suspends that.
fn interrupted(images: &[&str], new: &str) {
    let open = |path: &str| Arc::new(FileDevice::open(path.as_ref(), Access::ReadWrite).unwrap()) as Arc<dyn Device>;
    for _ in 0..10 {
        let fs = Fs::open(images.iter().map(|image| open(image)).collect(), MountOptions::default()).unwrap();
        let request = ReplaceRequest { devid: DevId(1), device: open(new), avoids_source: false };
        let done = std::thread::scope(|scope| {
            let replacing = scope.spawn(|| fs.replace_device(&request, &Job::new()));
            while fs.replace_status().is_none_or(|status| status.done_bytes.0 == 0) && !replacing.is_finished() {
                std::thread::yield_now();
            }
            fs.limit_replace(1 << 20);
            fs.suspend_replace();
            replacing.join().unwrap()
        });
        drop(request);
        fs.close().unwrap();
        if done.is_err() {
            return;
        }
        // It was complete: device 1 is to be replaced back.
        drop(fs);
        ok(ubtrfs(["replace", "start", "-f", "1", images[0], new]));
    }
    panic!("no replacement is interrupted");
}

#[test]
fn an_interrupted_replacement_goes_on_with_the_named_device_only() {
    if !capability::kernel_oracle() {
        return;
    }
    for (profile, members) in [("single", &["a.img"][..]), ("raid1", &["a.img", "b.img"])] {
        let bed = Bed::new();
        let images: Vec<String> = members.iter().map(|name| bed.at(name)).collect();
        let images: Vec<&str> = images.iter().map(String::as_str).collect();
        ok(ubtrfs([&["mkfs", "-q", "-b", "600M", "-d", profile][..], &images].concat()));
        let file = bed.at("source");
        fs::write(&file, (0..200 << 20_u32).step_by(4).flat_map(u32::to_le_bytes).collect::<Vec<u8>>()).unwrap();
        ok(ubtrfs(["cp", &file, &format!("{}:/source", images[0])]));
        // The new device of a filesystem on one device is not found beside it.
        fs::create_dir(bed.path("away")).unwrap();
        let (new, other) = (bed.blank("away/new.img", 600), bed.blank("other.img", 600));
        interrupted(&images, &new);
        let last = *images.last().unwrap();
        let start = |new: &str| ubtrfs(["replace", "start", "1", new, last]);
        for wrong in [&other, &bed.at("none.img")] {
            let done = start(wrong);
            let said = String::from_utf8_lossy(&done.stderr).into_owned();
            assert!(!done.status.success() && said.contains(&format!("goes to another device than {wrong}")), "{said}");
        }
        assert!(fs::read(bed.path("other.img")).unwrap().iter().all(|byte| *byte == 0), "it is left alone");
        let refuses = ["replacement of", "is not complete", "ubtrfs replace cancel"];
        let all = ["tune", "-m"].into_iter().chain(images.iter().copied());
        refused(&ubtrfs(all.clone()), &refuses);
        refused(&ubtrfs(all.chain([new.as_str()])), &refuses);
        let status = ok(ubtrfs(["replace", "status", "-1", last]));
        assert!(status.contains("suspended") && !status.contains(" 1.Jan"), "{status}");
        ok(start(&new));
        let now: Vec<&str> = [&[new.as_str()], &images[1..]].concat();
        btrfs_check_array(&now).unwrap();
        let copy = bed.at("copy");
        ok(ubtrfs(["cp", &format!("{new}:/source"), &copy]));
        sh("cmp", [&file, &copy]).unwrap();
    }
}

#[test]
fn a_pipe_is_no_device() {
    let bed = Bed::new();
    let (image, pipe) = (bed.at("a.img"), bed.at("pipe"));
    ok(ubtrfs(["mkfs", "-q", "-b", "300M", &image]));
    sh("mkfifo", [&pipe]).unwrap();
    for line in [
        &["device", "add", &pipe, &image][..],
        &["replace", "start", "1", &pipe, &image],
        &["device", "ready", &pipe],
        &["device", "scan", &pipe],
    ] {
        refused(&ubtrfs(line), &["is a pipe"]);
    }
}

#[test]
fn what_is_passed_over_in_a_damaged_image_is_told() {
    let bed = Bed::new();
    let image = bed.at("a.img");
    ok(ubtrfs(["mkfs", "-q", "-b", "300M", &image]));
    let content = "0123456789abcdef".repeat(4096);
    fs::write(bed.path("file"), &content).unwrap();
    ok(ubtrfs(["cp", &bed.at("file"), &format!("{image}:/file")]));
    let mut raw = fs::read(&image).unwrap();
    let place = raw.windows(64).position(|bytes| bytes == &content.as_bytes()[..64]).unwrap();
    raw[place + 100] = b'!';
    fs::write(&image, &raw).unwrap();
    let from = format!("{image}:/file");
    refused(&ubtrfs(["cat", &from]), &["checksum is"]);
    for line in [&["cat", "-o", "ro,rescue=all", &from][..], &["export", "-o", "ro,rescue=all", &from]] {
        let done = ubtrfs(line);
        assert!(done.status.success(), "{done:?}");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(said.starts_with("ubtrfs: data at ") && said.contains("is returned though it is damaged"), "{said}");
    }
}

#[test]
fn a_filesystem_is_made_on_a_seed_and_leaves_it() {
    let bed = Bed::new();
    let [seed, own, other] = ["seed.img", "own.img", "other.img"].map(|name| bed.at(name));
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", &seed]));
    fs::write(bed.path("of seed"), "of seed".repeat(2_000_000)).unwrap();
    ok(ubtrfs(["cp", &bed.at("of seed"), &format!("{seed}:/of seed")]));
    ok(ubtrfs(["tune", "-S", "1", &seed]));
    let before = fs::read(bed.path("seed.img")).unwrap();
    refused(&ubtrfs(["mkdir", &format!("{seed}:/new")]), &["it is a seed filesystem"]);
    bed.blank("own.img", 256);
    bed.blank("other.img", 256);
    refused(
        &ubtrfs(["device", "add", &own, &other, &seed]),
        &["other.img was not added to the seed", "ubtrfs mount", "own.img"],
    );
    let text = ok(ubtrfs(["device", "add", "-f", &own, &seed]));
    assert!(text.contains("is device 2 of the new filesystem") && text.contains("ubtrfs mount"), "{text}");
    let added: Value = serde_json::from_str(&ok(ubtrfs(["device", "add", "--json", &other, &seed]))).unwrap();
    assert!(added[0]["fsid"].is_string(), "{added}");
    // Both are written, and use the seed at the same time.
    for (image, name) in [(&own, "own"), (&other, "other")] {
        fs::write(bed.path(name), name.repeat(2_000_000)).unwrap();
        ok(ubtrfs(["cp", &bed.at(name), &format!("{image}:/{name}")]));
        assert!(ok(ubtrfs(["check", "--check-data-csum", image])).contains(": clean"));
    }
    assert!(!ok(ubtrfs(["inspect", "dump-tree", &own])).contains("corrupt"), "blocks on the seed have its UUID");
    let usage = ok(ubtrfs(["device", "usage", &own]));
    assert!(usage.contains("ID: 2") && !usage.contains("ID: 1\n"), "{usage}");
    let shown = ok(ubtrfs(["filesystem", "show", &own]));
    assert!(shown.contains("Total devices 2") && shown.contains("seed.img") && shown.contains("own.img"), "{shown}");
    refused(&ubtrfs(["filesystem", "resize", "1:max", &own]), &["device 1 is a seed device"]);
    bed.blank("third.img", 256);
    refused(&ubtrfs(["replace", "start", "1", &bed.at("third.img"), &own]), &["device 1 is a seed device"]);
    refused(&ubtrfs(["device", "remove", &own, &own]), &["its last device of its own", "ubtrfs device add"]);
    ok(ubtrfs(["scrub", "start", "-B", &own]));
    if capability::kernel_oracle() {
        bed.judge(&["own.img", "seed.img"], &["of seed", "own"]);
    }
    assert_eq!(ok(ubtrfs(["device", "remove", &seed, &own])), "device 1 was removed\n");
    assert!(fs::read(bed.path("seed.img")).unwrap() == before, "nothing is written to a seed");
    // It is found by any name beside the others.
    fs::rename(bed.path("seed.img"), bed.path("m/away")).unwrap();
    assert!(ok(ubtrfs(["check", "--check-data-csum", &own])).contains(": clean"));
    if capability::kernel_oracle() {
        bed.judge(&["own.img"], &["of seed", "own"]);
    }
    // Without its seed, the other one says what is missing.
    let refusal = ubtrfs(["mkdir", &format!("{other}:/new")]);
    refused(&refusal, &["device 1"]);
}

#[test]
fn a_mounted_seed_gets_a_filesystem_on_it() {
    if !capability::fuse() {
        return;
    }
    let bed = Bed::new();
    let [seed, own, third, m] = ["seed.img", "own.img", "third.img", "m"].map(|name| bed.at(name));
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", &seed]));
    ok(ubtrfs(["mkdir", &format!("{seed}:/dir")]));
    fs::write(bed.path("file"), "of the seed").unwrap();
    ok(ubtrfs(["cp", &bed.at("file"), &format!("{seed}:/dir/file")]));
    ok(ubtrfs(["tune", "-S", "1", &seed]));
    let before = fs::read(&seed).unwrap();
    bed.blank("own.img", 256);
    bed.blank("third.img", 256);
    assert!(ubtrfs(["mount", &seed, &m]).status.success());
    let at = |name: &str| Path::new(&m).join(name);
    let opened = fs::File::open(at("dir/file")).unwrap();
    let text = ubtrfs(["device", "add", &own, &third, &m]);
    // The mount shows the new filesystem, and stays read-only.
    refused(&text, &["third.img was not added to the seed", "mount -i -o remount,rw", "/m"]);
    let fsid = |of: &str| ok(ubtrfs(["filesystem", "show", of])).lines().next().unwrap().to_owned();
    assert!(ok(ubtrfs(["filesystem", "show", &m])).contains("Total devices 2"));
    assert_ne!(fsid(&m), fsid(&seed));
    assert!(fs::write(at("new"), "new").is_err());
    assert_eq!(fs::read(at("dir/file")).unwrap(), b"of the seed");
    // It is named by its own device, the seed by the seed's.
    assert_eq!(fsid(&own), fsid(&m));
    if capability::root() {
        let other = bed.at("other");
        fs::create_dir(&other).unwrap();
        refused(&ubtrfs(["mount", &own, &other]), &["read-only", "mount -o remount,rw", "/m"]);
        ok(ubtrfs(["mount", "-o", "remount,rw", &own, &m]));
        fs::write(at("new"), "new").unwrap();
        // In another pid namespace, no lock shows its holder.
        let inside = |words: &[&str]| {
            let mut all = vec!["-pf", "--mount-proc", env!("CARGO_BIN_EXE_ubtrfs")];
            all.extend(words);
            std::process::Command::new("unshare").args(all).output().unwrap()
        };
        assert!(!inside(&["filesystem", "label", &seed, "of another"]).status.success());
        assert_eq!(ok(inside(&["filesystem", "label", &m])), "\n");
        // A file that was opened before stays usable without a name.
        fs::remove_file(at("dir/file")).unwrap();
        let mut kept = String::new();
        (&opened).read_to_string(&mut kept).unwrap();
        assert_eq!(kept, "of the seed");
        ok(ubtrfs(["device", "add", &third, &m]));
        // The seed is mounted beside it, and shows its own content.
        let second = ubtrfs(["mount", &seed, &other]);
        assert!(second.status.success() && String::from_utf8_lossy(&second.stderr).contains("it is a seed filesystem"));
        assert!(!Path::new(&other).join("new").exists() && Path::new(&other).join("dir/file").exists());
        assert!(fs::write(Path::new(&other).join("x"), "x").is_err());
        ok(ubtrfs(["umount", &other]));
        ok(ubtrfs(["device", "remove", "1", &m]));
        assert!(std::process::Command::new("flock").args(["-n", &seed, "true"]).status().unwrap().success(), "it left");
    }
    drop(opened);
    ok(ubtrfs(["umount", &m]));
    assert!(fs::read(&seed).unwrap() == before, "nothing is written to a seed");
    assert!(ok(ubtrfs(["check", &own])).contains(": clean"));
    if capability::root() {
        assert_eq!(ok(ubtrfs(["cat", &format!("{own}:/new")])), "new");
        assert!(!ubtrfs(["cat", &format!("{own}:/dir/file")]).status.success());
    }
}

#[test]
fn a_device_that_left_does_not_count_as_mounted() {
    if !capability::fuse() {
        return;
    }
    let bed = Bed::new();
    let [first, second, m] = ["first.img", "second.img", "m"].map(|name| bed.at(name));
    bed.blank("first.img", 256);
    bed.blank("second.img", 256);
    let device = LoopDevice::over(Path::new(&first)).unwrap();
    ok(ubtrfs(["mkfs", "-q", device.path()]));
    ok(ubtrfs(["mount", device.path(), &m]));
    refused(&ubtrfs(["mkfs", "-f", device.path()]), &["is mounted", "m"]);
    ok(ubtrfs(["device", "add", &second, &m]));
    ok(ubtrfs(["device", "remove", "1", &m]));
    // The mount table still names it. It can be used, and come back.
    assert!(!ubtrfs(["filesystem", "show", device.path()]).status.success());
    ok(ubtrfs(["mkfs", "-q", device.path()]));
    ok(ubtrfs(["device", "add", "-f", device.path(), &m]));
    ok(ubtrfs(["device", "remove", "2", &m]));
    ok(ubtrfs(["umount", &m]));
    assert!(ok(ubtrfs(["check", device.path()])).contains(": clean"));
}

#[test]
fn commands_on_a_device_act_on_the_filesystem_that_it_has_now() {
    if !capability::fuse() {
        return;
    }
    let bed = Bed::new();
    let [a, b, m, other] = ["a.img", "b.img", "m", "other"].map(|name| bed.at(name));
    fs::create_dir(&other).unwrap();
    bed.blank("a.img", 256);
    bed.blank("b.img", 256);
    ok(ubtrfs(["mkfs", "-q", "-L", "old", "-d", "single", "-m", "raid1", &a, &b]));
    bed.blank("c.img", 256);
    ok(ubtrfs(["mount", &a, &m]));
    ok(ubtrfs(["device", "add", &bed.at("c.img"), &m]));
    ok(ubtrfs(["device", "remove", &a, &m]));
    ok(ubtrfs(["mkfs", "-q", "-L", "new", &a]));
    // Both mounts have the source `a.img` in the table of mounts.
    ok(ubtrfs(["mount", &a, &other]));
    assert_eq!(ok(ubtrfs(["filesystem", "label", &a])), "new\n");
    ok(ubtrfs(["filesystem", "label", &a, "newer"]));
    assert_eq!(ok(ubtrfs(["filesystem", "label", &m])), "old\n");
    assert_eq!(ok(ubtrfs(["filesystem", "label", &other])), "newer\n");
    refused(&ubtrfs(["device", "remove", "2", &a]), &["there is no device 2"]);
    refused(&ubtrfs(["ls", &format!("{a}:/")]), &["in use", &other]);
    ok(ubtrfs(["umount", &other]));
    // Nobody uses it now, though the first mount names it.
    assert_eq!(ok(ubtrfs(["filesystem", "label", &a])), "newer\n");
    ok(ubtrfs(["umount", &m]));
    assert!(ok(ubtrfs(["check", &b])).contains(": clean"));
}

#[test]
fn a_device_that_is_mounted_read_only_is_in_use() {
    if !capability::fuse() || !capability::root() {
        return;
    }
    let bed = Bed::new();
    let [image, m] = ["a.img", "m"].map(|name| bed.at(name));
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", &image]));
    ok(ubtrfs(["mount", "-o", "ro", &image, &m]));
    refused(&ubtrfs(["mkfs", "-f", &image]), &["in use", &m, "ubtrfs umount"]);
    ok(ubtrfs(["umount", &m]));
    // A second node of a device whose backing file has no name any more: no lock tells that it is mounted.
    let device = LoopDevice::over(Path::new(&image)).unwrap();
    let number = fs::metadata(device.path()).unwrap().rdev();
    let number = [rustix::fs::major(number), rustix::fs::minor(number)].map(|part| part.to_string());
    sh("mknod", [&bed.at("node"), "b", &number[0], &number[1]]).unwrap();
    fs::remove_file(&image).unwrap();
    ok(ubtrfs(["mount", "-o", "ro", device.path(), &m]));
    refused(&ubtrfs(["mkfs", "-f", &bed.at("node")]), &["is mounted", &m]);
    ok(ubtrfs(["umount", &m]));
}

#[test]
fn a_copy_of_a_seed_and_a_truncated_one_are_refused() {
    let bed = Bed::new();
    let [seed, copy, own] = ["seed.img", "a copy.img", "own.img"].map(|name| bed.at(name));
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", &seed]));
    ok(ubtrfs(["mkdir", &format!("{seed}:/dir")]));
    ok(ubtrfs(["tune", "-S", "1", &seed]));
    bed.blank("own.img", 256);
    ok(ubtrfs(["device", "add", &own, &seed]));
    refused(&ubtrfs(["tune", "-u", "-f", &own]), &["the filesystem builds on a seed"]);
    fs::copy(&seed, &copy).unwrap();
    let ls = |words: &[&str]| ubtrfs(["ls"].iter().chain(words).copied());
    refused(&ls(&[&own]), &["seed.img", "a copy.img", "both seed device 1", "-o device="]);
    assert_eq!(ok(ls(&["-o", &format!("device={seed}"), &own])), "dir\n");
    let both = format!("device={seed},device={copy}");
    refused(&ls(&["-o", &both, &own]), &["both device 1", "give only one of them"]);
    fs::remove_file(&seed).unwrap();
    assert_eq!(ok(ls(&[&own])), "dir\n");
    fs::File::options().write(true).open(&copy).unwrap().set_len(200 << 20).unwrap();
    refused(&ls(&[&own]), &["a copy.img is truncated", "209715200", "restore the whole seed"]);
    let checked = ubtrfs(["check", &own]);
    let found = String::from_utf8_lossy(&checked.stdout);
    assert!(!checked.status.success() && found.contains("device 1 has 209715200 bytes"), "{found}");
}

#[test]
fn devices_are_looked_at_before_the_first_one_is_added_or_removed() {
    let bed = Bed::new();
    let [a, b, c, none] = ["a.img", "b.img", "c.img", "none.img"].map(|name| bed.at(name));
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", "-d", "single", "-m", "single", &a, &b]));
    bed.blank("c.img", 256);
    fs::write(bed.path("precious"), "no zeros".repeat(5_000_000)).unwrap();
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", &bed.at("other.img")]));
    for (second, words) in [
        (&none, "none.img does not exist"),
        (&b, "is a device of this filesystem already"),
        (&bed.at("precious"), "is a file with content"),
        (&bed.at("other.img"), "contains a btrfs filesystem"),
    ] {
        refused(&ubtrfs(["device", "add", &c, second, &a]), &[words]);
        assert!(ok(ubtrfs(["filesystem", "show", &a])).contains("Total devices 2"), "{words}");
    }
    for twice in [["1", "1"], ["2", &b]] {
        refused(&ubtrfs(["device", "remove", twice[0], twice[1], &a]), &["is given twice"]);
        assert!(ok(ubtrfs(["filesystem", "show", &a])).contains("Total devices 2"), "{twice:?}");
    }
}

#[test]
fn a_removal_without_space_names_the_remedies() {
    let bed = Bed::new();
    let [a, b] = ["a.img", "b.img"].map(|name| bed.at(name));
    ok(ubtrfs(["mkfs", "-q", "-b", "500M", "-d", "raid1", "-m", "raid1", &a, &b]));
    fs::write(bed.path("file"), vec![7; 400 << 20]).unwrap();
    ok(ubtrfs(["cp", &bed.at("file"), &format!("{a}:/file")]));
    ok(ubtrfs(["device", "add", &bed.blank("c.img", 450), &a]));
    let output = ubtrfs(["device", "remove", "2", &a]);
    if output.status.success() {
        eprintln!("skipped: the space is enough");
        return;
    }
    refused(
        &output,
        &["no space left", "added a device", "removed files", "ubtrfs balance start -dusage=90 -musage=90"],
    );
    assert!(String::from_utf8_lossy(&output.stderr).ends_with(&format!(" {a}\n")), "{output:?}");
    ok(ubtrfs(["device", "add", &bed.blank("d.img", 200), &a]));
    ok(ubtrfs(["device", "remove", "2", &a]));
    assert!(ok(ubtrfs(["check", &a])).contains(": clean"));
}
