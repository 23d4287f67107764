//! Tests of `ubtrfs quota` and `ubtrfs qgroup` on images and mounts, compared with btrfs-progs on Linux's mount.

use std::path::Path;

use crate::common::{ok, refused, ubtrfs};
use ubtrfs_testkit::{Image, LoopMount, btrfs_check, capability, run};

#[track_caller]
fn out(args: &[&str]) -> String {
    ok(ubtrfs(args))
}

#[track_caller]
fn fails(args: &[&str], with: &str) {
    refused(&ubtrfs(args), &[with]);
}

/// Splits lines into words. The last column of higher groups is left out, because btrfs-progs 6.2 prints stray
/// bytes there.
fn words(text: &str) -> Vec<Vec<String>> {
    let lines = text.lines().filter(|line| !line.starts_with("---"));
    let of = |line: &str| -> Vec<String> {
        let is_higher = line.starts_with(|level: char| ('1'..='9').contains(&level));
        let line = line.split('<').next().filter(|_| is_higher).unwrap_or(line);
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let columns = if words.len() > 6 { 7 } else { 3 };
        if is_higher { words.into_iter().take(columns).collect() } else { words }
    };
    lines.map(of).collect()
}

fn linux_shows(image: &Path, options: &[&str]) -> String {
    let mount = LoopMount::new(image, "").unwrap();
    let point = mount.path().to_string_lossy().into_owned();
    let mut args = vec!["qgroup", "show"];
    args.extend(options);
    args.push(&point);
    let text = run("btrfs", args).unwrap();
    mount.close().unwrap();
    text
}

#[test]
fn groups_of_an_image_are_those_that_linux_shows() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let path = image.path().to_str().unwrap();
    let at = |name: &str| format!("{path}:/{name}");
    fails(&["qgroup", "show", path], "quotas are disabled");
    assert!(out(&["quota", "status", path]).contains("Enabled:                no"));
    out(&["subvolume", "create", &at("a")]);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), vec![7; 300_000]).unwrap();
    out(&["cp", file.path().to_str().unwrap(), &at("a/file")]);
    out(&["quota", "enable", path]);
    let status = out(&["quota", "status", path]);
    assert!(status.contains("Inconsistent:           no") && status.contains("Rescan:                 no"), "{status}");
    out(&["quota", "enable", path]);
    assert!(
        status.contains("Total count:            2\n") && status.contains("Level 0:                2\n"),
        "{status}"
    );
    out(&["quota", "status", "--is-enabled", path]);
    fails(&["quota", "enable", "--simple", path], "full quotas are enabled already");
    out(&["qgroup", "create", "1/100", path]);
    out(&["qgroup", "create", "2/5", path]);
    out(&["qgroup", "assign", "0/256", "1/100", path]);
    out(&["qgroup", "assign", "1/100", "2/5", path]);
    out(&["subvolume", "snapshot", "-i", "1/100", &at("a"), &at("s")]);
    out(&["subvolume", "create", "-i", "2/5", &at("b")]);
    out(&["qgroup", "limit", "10M", "1/100", path]);
    out(&["qgroup", "limit", "-e", "5M", &at("a")]);
    fails(&["qgroup", "create", "1/100", path], "exists");
    fails(&["qgroup", "destroy", "1/100", path], "has members");
    fails(&["qgroup", "destroy", "0/256", path], "belongs to a subvolume");
    fails(&["qgroup", "destroy", "3/1", path], "does not exist");
    fails(&["qgroup", "limit", "1M", "7/7", path], "does not exist");
    fails(&["qgroup", "limit", "1M", &at("a/file")], "not a subvolume, but a file or directory of subvolume 256");
    fails(&["qgroup", "assign", "2/5", "1/100", path], "not of a higher level");
    fails(&["qgroup", "assign", "0/256", "1/100", path], "already belongs");
    fails(&["qgroup", "remove", "0/256", "2/5", path], "does not belong");
    fails(&["subvolume", "create", "-i", "9/9", &at("c")], "no quota group 9/9");
    let all = ["-p", "-c", "-r", "-e", "--raw"];
    let ours = out(&[&["qgroup", "show"][..], &all, &[path]].concat());
    assert_eq!(words(&ours), words(&linux_shows(image.path(), &all)), "{ours}");
    for units in [&[][..], &["--si"], &["--kbytes"], &["--mbytes", "--si"], &["--tbytes"], &["--iec"]] {
        let ours = out(&[&["qgroup", "show"][..], units, &[path]].concat());
        assert_eq!(words(&ours), words(&linux_shows(image.path(), units)), "{units:?}: {ours}");
    }
    // Groups without a limit come first.
    for sort in [&["--sort=max_rfer", "-r"][..], &["--sort=-max_excl", "-e"], &["--sort=+excl,-qgroupid"]] {
        let ours = out(&[&["qgroup", "show"][..], sort, &[path]].concat());
        assert_eq!(words(&ours), words(&linux_shows(image.path(), sort)), "{sort:?}: {ours}");
    }
    let members = out(&["qgroup", "show", path]);
    assert!(members.contains("<2 member qgroups>"), "{members}");
    let json: serde_json::Value = serde_json::from_str(&out(&["qgroup", "show", "--json", path])).unwrap();
    assert_eq!(json["qgroup-show"][3]["qgroupid"], "0/258");
    let sorted = out(&["qgroup", "show", "--sort=-rfer,qgroupid", path]);
    assert!(sorted.lines().nth(2).unwrap().starts_with("2/5"), "{sorted}");
    let of_path = out(&["qgroup", "show", "-F", &at("b")]);
    assert_eq!(of_path.lines().count(), 4, "{of_path}");
    assert!(out(&["qgroup", "show", "--tree", path]).contains("\n  1/100 "));
    out(&["qgroup", "limit", "none", "1/100", path]);
    out(&["qgroup", "remove", "0/256", "1/100", path]);
    out(&["quota", "rescan", "-w", path]);
    btrfs_check(image.path()).unwrap();
    let ours = out(&[&["qgroup", "show"][..], &all, &[path]].concat());
    assert_eq!(words(&ours), words(&linux_shows(image.path(), &all)), "{ours}");
    out(&["quota", "disable", path]);
    fails(&["qgroup", "show", path], "quotas are disabled");
    btrfs_check(image.path()).unwrap();
}

#[test]
fn numbers_lead_to_paths() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    let script = "btrfs -q subvolume create a; mkdir a/d; head -c 100000 /dev/urandom > a/d/file; ln a/d/file a/link
        cp --reflink=always a/d/file a/copy; btrfs -q subvolume snapshot a s; sync";
    run("bash", ["-ec", &format!("cd {} && {script}", mount.path().display())]).unwrap();
    let point = mount.path().to_string_lossy().into_owned();
    let ino = run("stat", ["-c", "%i", &format!("{point}/a/d/file")]).unwrap().trim().to_owned();
    let dump = run("btrfs", ["inspect-internal", "dump-tree", "-t", "256", mount.device()]).unwrap();
    let bytenr = dump.split("disk byte ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    let sorted = |text: String| {
        let mut lines: Vec<String> = text.lines().map(|line| line.replace(&point, "")).collect();
        lines.sort();
        lines
    };
    let names = sorted(run("btrfs", ["inspect-internal", "inode-resolve", &ino, &format!("{point}/a")]).unwrap());
    let inside = (bytenr.parse::<u64>().unwrap() + 8192).to_string();
    let inodes = [&bytenr, &inside]
        .map(|at| sorted(run("btrfs", ["inspect-internal", "logical-resolve", "-P", at, &point]).unwrap()));
    mount.close().unwrap();
    let path = image.path().to_str().unwrap();
    let at = |name: &str| format!("{path}:/{name}");
    // The expected paths are written out, because btrfs-progs prints only the paths in subvolumes that are mounted
    // separately.
    let users = ["/a/copy", "/a/d/file", "/a/link", "/s/copy", "/s/d/file", "/s/link"];
    assert_eq!(sorted(out(&["inspect", "logical-resolve", &bytenr, path])), users);
    assert_eq!(sorted(out(&["inspect", "inode-resolve", &ino, &at("a")])), names);
    let ours = [&bytenr, &inside].map(|at| sorted(out(&["inspect", "logical-resolve", "-P", at, path])));
    assert_eq!(ours, inodes);
    assert_eq!(out(&["inspect", "subvolid-resolve", "257", path]), "s\n");
    assert_eq!(out(&["inspect", "rootid", &at("s/d")]), "257\n");
    fails(&["inspect", "logical-resolve", "1", path], "no data extent");
    fails(&["inspect", "inode-resolve", "99999", path], "");
    fails(&["inspect", "subvolid-resolve", "999", path], "");
}

#[test]
fn a_mount_takes_the_same_commands() {
    if !capability::fuse() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let path = image.path().to_str().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let point = dir.path().to_str().unwrap();
    out(&["mount", path, point]);
    std::fs::write(dir.path().join("file"), vec![1; 100_000]).unwrap();
    out(&["quota", "enable", point]);
    out(&["quota", "rescan", "-W", point]);
    assert_eq!(out(&["quota", "rescan", "-q", point]) + &out(&["qgroup", "clear-stale", "-q", point]), "");
    out(&["quota", "rescan", "-W", point]);
    out(&["subvolume", "create", &format!("{point}/sub")]);
    std::fs::write(dir.path().join("sub/file"), vec![1; 50_000]).unwrap();
    let shown = out(&["qgroup", "show", "--sync", "--raw", point]);
    let rows = words(&shown);
    assert_eq!(rows.last().unwrap()[..2], ["0/256".to_owned(), (16384 + 53248).to_string()], "{shown}");
    out(&["umount", point]);
    assert_eq!(words(&out(&["qgroup", "show", "--raw", path])), rows);
    btrfs_check(image.path()).unwrap();
}

#[test]
fn mkfs_enables_quotas_as_mkfs_of_btrfs_progs_does() {
    if !capability::kernel_oracle() {
        return;
    }
    let dir = tempfile::TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (theirs, ours) = (path("theirs"), path("ours"));
    std::fs::File::create(&theirs).unwrap().set_len(512 << 20).unwrap();
    run("mkfs.btrfs", ["-q", "-R", "quota", &theirs]).unwrap();
    out(&["mkfs", "-q", "-b", "512M", "-R", "quota", &ours]);
    let status = out(&["quota", "status", &ours]);
    assert!(status.contains("qgroup (full") && status.contains("Inconsistent:           no"), "{status}");
    btrfs_check(Path::new(&ours)).unwrap();
    let show = |image: &str| words(&linux_shows(Path::new(image), &["-p", "-r", "-e", "--raw"]));
    assert_eq!(show(&ours), show(&theirs));
    fails(&["mkfs", "-f", "-O", "quota,squota", &ours], "exclude each other");

    // The copied files are counted, on several devices too.
    let (tree, simple, second) = (path("tree"), path("simple"), path("second"));
    std::fs::create_dir(&tree).unwrap();
    std::fs::write(Path::new(&tree).join("file"), vec![7; 1 << 20]).unwrap();
    for feature in ["quota", "squota"] {
        let made = out(&["mkfs", "-f", "-b", "512M", "-r", &tree, "-O", feature, &simple]);
        assert!(made.contains(&format!("{feature}, ")), "{made}");
        let shown = out(&["qgroup", "show", "--raw", &simple]);
        let referenced: u64 = words(&shown)[1][1].parse().unwrap();
        assert!((1 << 20..2 << 20).contains(&referenced), "{shown}");
        out(&["check", &simple]);
        // Linux takes the same numbers for its own, and continues to count.
        let mount = LoopMount::new(Path::new(&simple), "").unwrap();
        std::fs::write(mount.path().join("more"), vec![7; 1 << 20]).unwrap();
        mount.close().unwrap();
        out(&["check", &simple]);
        assert!(out(&["quota", "status", &simple]).contains("Inconsistent:           no"));
    }
    out(&["mkfs", "-q", "-f", "-b", "300M", "-O", "squota", &simple, &second]);
    assert!(out(&["quota", "status", &simple]).contains("squota"));
}
