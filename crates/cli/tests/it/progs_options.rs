//! Tests of options that the program takes over from btrfs-progs. Their output is compared with that of btrfs-progs on
//! Linux's mount of the same image.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;
use ubtrfs_testkit::{Image, LoopMount, btrfs_check, capability, run as sh};

use crate::common::{ok, refused, text, ubtrfs};

/// An image that Linux made: subvolume `a` with file `f`, whose data `g` and `h` share; a snapshot `s` of `a`; quotas.
fn image() -> Image {
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    let at = |name: &str| text(&linux.join(name));
    sh("btrfs", ["subvolume", "create", &at("a")]).unwrap();
    fs::write(linux.join("a/f"), [7; 200_000]).unwrap();
    for copy in ["a/g", "a/h"] {
        sh("cp", ["--reflink=always", &at("a/f"), &at(copy)]).unwrap();
    }
    sh("btrfs", ["quota", "enable", &at("")]).unwrap();
    // A snapshot during the rescan that `enable` starts may leave wrong numbers.
    sh("btrfs", ["quota", "rescan", "-w", &at("")]).unwrap();
    sh("btrfs", ["subvolume", "snapshot", "-r", &at("a"), &at("s")]).unwrap();
    sh("btrfs", ["qgroup", "limit", "1G", &at("a")]).unwrap();
    sh("btrfs", ["quota", "rescan", "-w", &at("")]).unwrap();
    linux.close().unwrap();
    image
}

/// A mount by the program; unmounted on drop.
struct Mount(TempDir);

impl Mount {
    fn new(image: &Path) -> Self {
        let dir = TempDir::with_prefix("ubtrfs-progs-").unwrap();
        ok(ubtrfs(["mount", &text(image), &text(dir.path())]));
        Self(dir)
    }

    fn at(&self, path: &str) -> String {
        text(&self.0.path().join(path))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = ubtrfs(["umount", &text(self.0.path())]);
    }
}

/// The lines without trailing spaces, and without those about send and receive.
fn lines(show: &str) -> Vec<String> {
    let is_kept = |line: &&str| !["Send ", "Receive "].iter().any(|word| line.trim_start().starts_with(word));
    show.lines().filter(is_kept).map(|line| line.trim_end().to_owned()).collect()
}

#[test]
fn a_subvolume_is_shown_with_its_quota_group_by_path_id_or_uuid() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let image = image();
    let linux = LoopMount::new(image.path(), "ro").unwrap();
    let progs = |args: &[&str]| sh("btrfs", ["subvolume"].iter().chain(args)).unwrap();
    let top = text(linux.path());
    let list = progs(&["list", "-u", &top]);
    let uuid = list.lines().next().unwrap().split_whitespace().nth(8).unwrap().to_owned();
    let by_path = [progs(&["show", &text(&linux.join("a"))]), progs(&["show", "--raw", &text(&linux.join("s"))])];
    let by_id = progs(&["show", "-r", "257", &top]);
    let by_uuid = progs(&["show", "-u", &uuid, "--kbytes", &top]);
    linux.close().unwrap();
    assert!(by_path[0].contains("Limit referenced:\t1.00GiB") && by_uuid.contains("KiB"), "{by_path:?}");

    let path = text(image.path());
    let compare = |top: &str, at: &dyn Fn(&str) -> String| {
        let show = |args: &[&str]| lines(&ok(ubtrfs(["subvolume", "show"].iter().chain(args))));
        assert_eq!(show(&[&at("a")]), lines(&by_path[0]));
        assert_eq!(show(&["--raw", &at("s")]), lines(&by_path[1]));
        assert_eq!(show(&["-r", "257", top]), lines(&by_id));
        assert_eq!(show(&["--uuid", &uuid, "--kbytes", top]), lines(&by_uuid));
        let json: Value = serde_json::from_str(&ok(ubtrfs(["subvolume", "show", "--json", &at("a")]))).unwrap();
        assert_eq!(
            (&json["qgroup"]["qgroupid"], &json["qgroup"]["max_referenced"]),
            (&"0/256".into(), &(1 << 30).into())
        );
        refused(&ubtrfs(["subvolume", "show", "-r", "999", top]), &["no subvolume with id 999", "list -u"]);
        refused(&ubtrfs(["subvolume", "show", "-u", &uuid.replace(&uuid[..8], "00000000"), top]), &["with UUID"]);
    };
    compare(&path, &|name| format!("{path}:/{name}"));
    let mount = Mount::new(image.path());
    compare(&mount.at(""), &|name| mount.at(name));
    drop(mount);
    btrfs_check(image.path()).unwrap();
}

#[test]
fn a_flag_may_be_repeated_and_numbers_may_be_hexadecimal() {
    let dir = TempDir::new().unwrap();
    let image = text(&dir.path().join("a.img"));
    ok(ubtrfs(["mkfs", "-q", "-q", "-f", "-f", "-L", "one", "-L", "two", "-b", "128M", &image]));
    assert_eq!(ok(ubtrfs(["filesystem", "label", &image])), "two\n");
    for words in [
        &["subvolume", "list", "-u", "-u", "-t", "-t"][..],
        &["filesystem", "df", "--si", "--si"],
        &["filesystem", "usage", "-b", "-b"],
        &["device", "stats", "-T", "-T"],
        &["balance", "start", "-v", "-v", "--full-balance", "--full-balance"],
        &["check", "--json", "--json"],
    ] {
        let output = ubtrfs(words.iter().chain(&[image.as_str()]));
        assert!(output.status.success(), "{words:?}: {output:?}");
    }
    let file = text(&dir.path().join("f"));
    fs::write(&file, vec![7; 1 << 20]).unwrap();
    ok(ubtrfs(["cp", &file, &format!("{image}:/f")]));
    let extents: Value =
        serde_json::from_str(&ok(ubtrfs(["filesystem", "fiemap", "--json", &format!("{image}:/f")]))).unwrap();
    let address = extents[0]["address"].as_u64().unwrap();
    for number in [format!("{address}"), format!("{address:#x}"), format!("0X{address:X}")] {
        assert!(ok(ubtrfs(["inspect", "logical-resolve", &number, &image])).contains("/f"), "{number}");
    }
    assert!(ok(ubtrfs(["inspect", "inode-resolve", "0x101", &image])).contains("/f"));
    for wrong in ["0x", "0x+1", "x1", "-1", "0xg"] {
        assert!(!ubtrfs(["inspect", "logical-resolve", wrong, &image]).status.success(), "{wrong}");
    }
}

#[test]
fn error_counters_are_tabulated() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let linux = LoopMount::new(image.path(), "ro").unwrap();
    let theirs = sh("btrfs", ["device", "stats", "-T", &text(linux.path())]).unwrap();
    linux.close().unwrap();
    let ours = ok(ubtrfs(["device", "stats", "-T", &text(image.path())]));
    let words = |text: &str| text.lines().map(|line| line.split_whitespace().map(str::to_owned).collect()).collect();
    let (ours_words, theirs_words): (Vec<Vec<String>>, Vec<Vec<String>>) = (words(&ours), words(&theirs));
    assert_eq!(ours_words[0], theirs_words[0]);
    assert_eq!(ours_words[2][2..], theirs_words[2][2..]);
    assert_eq!(ours_words[2][1], text(image.path()));
    let widths: Vec<usize> = ours.lines().map(str::len).collect();
    assert!(widths.iter().all(|width| *width == widths[0]), "{ours}");
}

#[test]
fn results_of_logical_resolve_fit_into_the_given_buffer() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let image = image();
    let path = text(image.path());
    let extents = ok(ubtrfs(["filesystem", "fiemap", "--json", &format!("{path}:/a/f")]));
    let extents: Value = serde_json::from_str(&extents).unwrap();
    let address = extents[0]["address"].as_u64().unwrap().to_string();
    let second = (address.parse::<u64>().unwrap() + 4096).to_string();
    let linux = LoopMount::new(image.path(), "ro").unwrap();
    let theirs = |args: &[&str]| {
        let point = text(linux.path());
        let args: Vec<&str> =
            ["inspect-internal", "logical-resolve", "-P"].iter().chain(args).chain([&&*point]).copied().collect();
        let mut lines: Vec<String> = sh("btrfs", args).unwrap().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let words: [&[&str]; 4] = [&[&address], &["-v", &second], &["-o", &second], &["-s", "1M", &second]];
    let words_of_theirs: [&[&str]; 4] = [&[&address], &["-v", &second], &["-o", &second], &["-s", "1048576", &second]];
    let expected = words_of_theirs.map(theirs);
    let few = theirs(&["-s", "64", &address]).len();
    linux.close().unwrap();
    let check = |place: &str| {
        let ours = |args: &[&str]| ubtrfs(["inspect", "logical-resolve", "-P"].iter().chain(args).chain([&place]));
        for (words, expected) in words.iter().zip(&expected) {
            let mut lines: Vec<String> = ok(ours(words)).lines().map(str::to_owned).collect();
            lines.sort();
            assert_eq!(lines, *expected, "{words:?}");
        }
        let output = ours(&["-s", "64", &address]);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), few);
        assert!(String::from_utf8_lossy(&output.stderr).contains("give a larger -s"), "{output:?}");
        let all = ok(ours(&[&address])).lines().count();
        let output = ours(&["-s", &(16 + 24 * all).to_string(), &address]);
        assert_eq!((ok(output.clone()).lines().count(), output.stderr), (all, Vec::new()), "exactly enough room");
        refused(&ours(&["-s", "30", &address]), &["at least 40"]);
        let paths = ubtrfs(["inspect", "logical-resolve", "-s", "64", &address, place]);
        assert_eq!(String::from_utf8_lossy(&paths.stdout).lines().count(), few, "{paths:?}");
        ok(ubtrfs(["inspect", "inode-resolve", "-v", "256", place]));
    };
    check(&path);
    let mount = Mount::new(image.path());
    check(&mount.at(""));
    drop(mount);
    btrfs_check(image.path()).unwrap();
}

#[test]
fn a_global_format_is_the_option_json_of_the_command() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = image();
    let path = text(image.path());
    for line in ["subvolume list", "device stats", "filesystem df", "qgroup show", "quota status", "balance status"] {
        let words: Vec<&str> = line.split(' ').chain([&*path]).collect();
        let run = |first: &[&str], last: &[&str]| ok(ubtrfs(first.iter().chain(&words).chain(last)));
        let json = run(&[], &["--json"]);
        serde_json::from_str::<Value>(&json).unwrap();
        assert_eq!(run(&["--format", "json"], &[]), json, "{line}");
        assert_eq!(run(&["--format=json"], &["--json"]), json, "{line}");
        assert_eq!(run(&["--format", "text"], &[]), run(&[], &[]), "{line}");
    }
    refused(
        &ubtrfs(["--format", "json", "subvolume", "create", "x"]),
        &["ubtrfs subvolume create does not print JSON"],
    );
    refused(&ubtrfs(["--format", "xml", "subvolume", "list", &path]), &["xml", "text, json"]);
    let status: Value = serde_json::from_str(&ok(ubtrfs(["quota", "status", "--json", &path]))).unwrap();
    assert_eq!((&status["enabled"], &status["mode"], &status["qgroups"]), (&true.into(), &"qgroup".into(), &3.into()));
}

#[test]
fn deletions_are_listed_until_their_space_is_free_and_say_whether_they_are_committed() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let image = image();
    let mount = Mount::new(image.path());
    let file = fs::File::open(mount.0.path().join("s/f")).unwrap();
    let delete = |options: &[&str], name: &str| {
        ok(ubtrfs(["subvolume", "delete"].iter().chain(options).chain([&&*mount.at(name)])))
    };
    let target = |name: &str| mount.at(name);
    let said = delete(&["-v"], "s");
    assert_eq!(said, format!("Transaction commit: none (default)\nDelete subvolume (no-commit): '{}'\n", target("s")));
    let top = mount.at("");
    let list = ok(ubtrfs(["subvolume", "list", "-d", &top]));
    assert!(list.starts_with("ID 257 gen ") && list.ends_with(" top level 0 path DELETED\n"), "{list}");
    assert!(ok(ubtrfs(["subvolume", "list", "-dt", &top])).ends_with("\t0\t\tDELETED\n"));
    let json: Value = serde_json::from_str(&ok(ubtrfs(["subvolume", "list", "-d", "--json", &top]))).unwrap();
    assert_eq!((&json[0]["id"], &json[0]["path"]), (&257.into(), &Value::Null));
    drop(file);
    // The kernel forgets the file some time after it is closed.
    let mut waits = 0..200;
    while !ok(ubtrfs(["subvolume", "list", "-d", &top])).is_empty() {
        assert!(waits.next().is_some(), "the space does not become free");
        std::thread::sleep(std::time::Duration::from_millis(50));
        ok(ubtrfs(["subvolume", "sync", &top]));
    }
    for (option, name) in [("-c", "x"), ("-C", "y"), ("--commit", "z")] {
        ok(ubtrfs(["subvolume", "create", &mount.at(name)]));
        let said = delete(&["-v", option], name);
        assert_eq!(said, format!("Transaction commit: after each\nDelete subvolume (commit): '{}'\n", target(name)));
    }
    drop(mount);
    btrfs_check(image.path()).unwrap();
}

#[test]
fn a_balance_in_the_background_prints_its_filters_and_its_status_as_json() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let image = image();
    let mount = Mount::new(image.path());
    let said = ok(ubtrfs(["balance", "start", "--background", "-v", "-dusage=50", &mount.at("")]));
    assert_eq!(said, "  DATA: usage=0..50\n");
    // The exit status is 1 while the balance runs.
    let mut waits = 0..100;
    while ubtrfs(["balance", "status", &mount.at("")]).status.code() == Some(1) {
        assert!(waits.next().is_some(), "the balance does not end");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    assert_eq!(ok(ubtrfs(["balance", "status", "--json", &mount.at("")])), "null\n");
    drop(mount);
    btrfs_check(image.path()).unwrap();
}
