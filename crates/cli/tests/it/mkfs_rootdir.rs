//! Tests of `mkfs --rootdir` for builders of images: subvolumes, compression, and images as small as they can be.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use tempfile::TempDir;
use ubtrfs_testkit::{Compare, LoopMount, btrfs_check, capability, compare_trees, judge, run as sh};

use crate::common::{command, ok, refused, text, ubtrfs};

/// A directory with a tree to copy, and a place for images.
struct Source(TempDir);

impl Source {
    fn new() -> Self {
        let source = Self(TempDir::with_prefix("ubtrfs-rootdir-").unwrap());
        fs::create_dir_all(source.path("root/home/user")).unwrap();
        fs::create_dir_all(source.path("root/usr/lib")).unwrap();
        fs::write(source.path("root/home/user/notes"), "text\n".repeat(100_000)).unwrap();
        fs::write(source.path("root/usr/lib/code"), [7; 300_000]).unwrap();
        // A name in another subvolume cannot be a link to the same file.
        fs::hard_link(source.path("root/usr/lib/code"), source.path("root/home/code")).unwrap();
        fs::hard_link(source.path("root/usr/lib/code"), source.path("root/usr/code")).unwrap();
        source
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn at(&self, name: &str) -> String {
        text(&self.path(name))
    }
}

#[test]
fn directories_become_subvolumes_of_the_wanted_kinds() {
    if !capability::kernel_oracle() {
        return;
    }
    let source = Source::new();
    let (root, image) = (source.at("root"), source.at("a.img"));
    let made = ubtrfs([
        "mkfs",
        "-q",
        "-r",
        &root,
        "--subvol",
        "ro:usr",
        "--subvol",
        "default:home",
        "-u",
        "home/user",
        &image,
    ]);
    let told = String::from_utf8_lossy(&made.stderr).into_owned();
    assert!(told.lines().count() == 1 && told.contains("/home/code") && told.contains("two in the copy"), "{told}");
    assert!(made.status.success());
    let list = ok(ubtrfs(["subvolume", "list", &image]));
    let paths: Vec<&str> = list.lines().filter_map(|line| line.split(" path ").nth(1)).collect();
    assert_eq!(paths.len(), 3, "{list}");
    // The default subvolume is the root of the image for this command.
    assert!(["usr", "home", "user"].iter().all(|path| paths.contains(path)), "{list}");
    assert!(ok(ubtrfs(["subvolume", "list", "-r", &image])).ends_with("path usr\n"));
    assert!(ok(ubtrfs(["subvolume", "get-default", &image])).ends_with("path home\n"));
    btrfs_check(&source.path("a.img")).unwrap();
    let linux = LoopMount::new(&source.path("a.img"), "ro,subvolid=5").unwrap();
    sh("diff", ["-r", &root, &text(linux.path())]).unwrap();
    linux.close().unwrap();
    let refuses = |subvolumes: &[&str], words: &[&str]| {
        let mut line = vec!["mkfs".to_owned(), "-q".to_owned(), "-r".to_owned(), root.clone()];
        line.extend(subvolumes.iter().flat_map(|path| ["--subvol".to_owned(), (*path).to_owned()]));
        line.push(source.at("b.img"));
        refused(&ubtrfs(&line), words);
        assert!(!source.path("b.img").exists());
    };
    refuses(&["nope"], &["--subvol /nope", "is not a directory", "nothing was made"]);
    refuses(&["usr/code"], &["is not a directory"]);
    refuses(&["usr", "ro:usr/"], &["given twice"]);
    refuses(&["default:usr", "default-ro:home"], &["choose one"]);
    refuses(&["../root"], &["names nothing below --rootdir"]);
}

#[test]
fn a_compressed_and_shrunk_image_has_the_same_tree_in_fewer_bytes() {
    if !capability::kernel_oracle() {
        return;
    }
    let source = Source::new();
    let root = source.at("root");
    let len = |name: &str| fs::metadata(source.path(name)).unwrap().len();
    ok(ubtrfs(["mkfs", "-q", "-r", &root, &source.at("plain.img")]));
    ok(ubtrfs(["mkfs", "-q", "-r", &root, "--compress", "zstd:9", "--shrink", &source.at("small.img")]));
    assert!(len("small.img") < len("plain.img") / 2, "{} and {}", len("small.img"), len("plain.img"));
    for name in ["plain.img", "small.img"] {
        judge(&source.path(name), "", &[]).unwrap();
        let linux = LoopMount::new(&source.path(name), "ro").unwrap();
        compare_trees(&source.path("root"), linux.path(), Compare::COPY).unwrap();
        linux.close().unwrap();
    }
    let used = |name: &str| {
        let extents = ok(ubtrfs(["filesystem", "fiemap", &source.at(&format!("{name}:/home/user/notes"))]));
        extents.contains("encoded")
    };
    assert!(used("small.img") && !used("plain.img"));
    refused(&ubtrfs(["mkfs", "-r", &root, "--compress", "zip", &source.at("b.img")]), &["zip"]);
}

#[test]
fn the_root_directory_has_the_wanted_owner_or_that_of_the_copied_directory() {
    let source = Source::new();
    let root = source.at("root");
    let owner = |image: &str| {
        let stat = ok(ubtrfs(["stat", "--json", &source.at(&format!("{image}:/"))]));
        let stat: serde_json::Value = serde_json::from_str(&stat).unwrap();
        (stat["uid"].as_u64().unwrap(), stat["gid"].as_u64().unwrap())
    };
    let made = ok(ubtrfs(["mkfs", "-r", &root, "--root-owner", "7:8", &source.at("given.img")]));
    assert!(made.contains("owned by 7:8"), "{made}");
    assert_eq!(owner("given.img"), (7, 8));
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&root, Some(70), Some(80)).unwrap();
        let made = ok(ubtrfs(["mkfs", "-r", &root, &source.at("copied.img")]));
        assert!(made.contains("owned by 70:80"), "{made}");
        assert_eq!(owner("copied.img"), (70, 80));
    }
}

#[test]
fn a_shrunk_image_has_the_size_that_is_printed_whatever_size_was_given() {
    let source = Source::new();
    let root = source.at("root");
    let mut sizes = std::collections::BTreeSet::new();
    for size in [None, Some("128M"), Some("300M"), Some("2G"), Some("20G")] {
        let image = source.at(&format!("{}.img", size.unwrap_or("none")));
        let mut line = vec!["mkfs", "--json", "-r", &root, "--shrink"];
        line.extend(size.iter().flat_map(|size| ["-b", size]));
        line.push(&image);
        let made: serde_json::Value = serde_json::from_str(&ok(ubtrfs(&line))).unwrap();
        let len = fs::metadata(&image).unwrap().len();
        assert_eq!(made["devices"][0]["size"], len, "{made}");
        let shown = ok(ubtrfs(["filesystem", "usage", "--raw", &image]));
        let allocated: u64 = made["block_groups"].as_array().unwrap().iter().fold(0, |sum, group| {
            let copies = if group["profile"] == "dup" || group["profile"] == "DUP" { 2 } else { 1 };
            sum + copies * group["length"].as_u64().unwrap()
        });
        assert!(shown.contains(&format!("Device allocated:\t\t{allocated:>18}")), "{allocated}: {shown}");
        sizes.insert(len);
        fs::remove_file(&image).unwrap();
    }
    assert_eq!(sizes.len(), 1, "{sizes:?}");
    let image = source.at("small.img");
    refused(&ubtrfs(["mkfs", "-r", &root, "--shrink", "-b", "1M", &image]), &["needs", "-b gives 1.00MiB"]);
    assert!(!source.path("small.img").exists());
    fs::write(&image, "").unwrap();
    refused(&ubtrfs(["mkfs", "-r", &root, "--shrink", "-b", "1M", &image]), &["needs"]);
    assert_eq!(fs::metadata(&image).unwrap().len(), 0);
}

/// Makes an image with the time and the UUIDs of a reproducible build, and reads it.
fn build(source: &Source, root: &str, image: &str, cpus: &str) -> Vec<u8> {
    let program = env!("CARGO_BIN_EXE_ubtrfs");
    let run = |args: &[&str]| {
        let mut command = std::process::Command::new("taskset");
        command.args(["-c", cpus, program]).args(args).env("SOURCE_DATE_EPOCH", "1700000000");
        // It says that a link between two subvolumes becomes a file.
        let done = command.output().unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    let (root, image) = (source.at(root), source.at(image));
    run(&[
        "mkfs",
        "-q",
        "-U",
        FSID,
        "-b",
        "300M",
        "-r",
        &root,
        "--compress",
        "zstd",
        "-u",
        "ro:usr",
        "-u",
        "home",
        &image,
    ]);
    run(&["subvolume", "snapshot", "-r", &format!("{image}:/home"), &format!("{image}:/kept")]);
    run(&["mkdir", &format!("{image}:/made")]);
    let bytes = fs::read(&image).unwrap();
    fs::remove_file(&image).unwrap();
    bytes
}

const FSID: &str = "11111111-2222-3333-4444-555555555555";

#[test]
fn equal_trees_give_equal_images_with_a_fixed_time() {
    let source = Source::new();
    for number in 0..3000 {
        let (dir, data) = (source.path(&format!("root/many/{}", number % 7)), vec![number as u8; number * 7]);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(number.to_string()), data).unwrap();
    }
    // The copy has the same content, in files of other numbers that were made in another order and read at other times.
    let (from, to) = (source.path("root"), source.path("copy"));
    sh("cp", ["-a".as_ref(), from.as_os_str(), to.as_os_str()]).unwrap();
    fs::read(source.path("copy/many/3/3")).unwrap();
    let later = std::process::Command::new("touch")
        .args(["-d", "2020-01-01", &source.at("root/usr"), &source.at("copy/usr")])
        .status();
    assert!(later.unwrap().success());
    let first = build(&source, "root", "a.img", "0");
    for (root, cpus) in [("root", "0"), ("root", "0-63"), ("copy", "0-63")] {
        assert!(build(&source, root, "a.img", cpus) == first, "{root}, processors {cpus}");
    }
    fs::write(source.path("a.img"), first).unwrap();
    if capability::kernel_oracle() {
        btrfs_check(&source.path("a.img")).unwrap();
        let mount = LoopMount::new(&source.path("a.img"), "subvolid=5").unwrap();
        assert_eq!(fs::read(mount.join("many/5/2994")).unwrap(), vec![2994_u32 as u8; 2994 * 7]);
        mount.close().unwrap();
    }
    let refused = std::process::Command::new(env!("CARGO_BIN_EXE_ubtrfs"))
        .args(["mkfs", "-b", "128M", &source.at("b.img")])
        .env("SOURCE_DATE_EPOCH", "today")
        .output()
        .unwrap();
    assert!(!refused.status.success() && !source.path("b.img").exists());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("SOURCE_DATE_EPOCH is 'today'"));
}

/// Flags that the kernel shows, and the numbers of checksums, which the second checker counts.
#[test]
fn files_get_the_wanted_owners_and_flags() {
    if !capability::kernel_oracle() || !rustix::process::geteuid().is_root() {
        return;
    }
    let source = Source::new();
    let (root, image) = (source.at("root"), source.at("a.img"));
    let owned = |name: &str, uid: u32, gid: u32| {
        std::os::unix::fs::lchown(source.path(name), Some(uid), Some(gid)).unwrap();
    };
    owned("root/home/user", 1000, 100);
    owned("root/home/user/notes", 100_005, 0);
    let mkfs = |options: &[&str]| ubtrfs(["mkfs", "-q", "-f", "-r", &root].iter().chain(options).chain([&&*image]));
    let seen = |paths: &[&str]| {
        judge(image.as_ref(), "", &[]).unwrap();
        let linux = LoopMount::new(image.as_ref(), "ro").unwrap();
        let facts: Vec<String> = paths
            .iter()
            .map(|path| {
                let path = text(&linux.path().join(path));
                let owner = sh("stat", ["-c", "%u:%g", &path]).unwrap();
                let flags = sh("lsattr", ["-d", &path]).unwrap();
                let is_nocow = flags.split(' ').next().unwrap().contains('C');
                format!("{} {}", owner.trim(), if is_nocow { "C" } else { "-" })
            })
            .collect();
        sh("diff", ["-r", &root, &text(linux.path())]).unwrap();
        linux.close().unwrap();
        facts
    };
    let paths = ["home", "home/user", "home/user/notes", "usr/lib/code"];
    ok(mkfs(&[
        "--compress=zstd",
        "--map-users=0:0:1",
        "--map-users=1000:500:1",
        "--map-users=100000:1:65535",
        "--map-groups=0:7:200",
        "--inode-flags=nodatacow:home/user",
        "--inode-flags=nodatasum:usr",
    ]));
    assert_eq!(seen(&paths), ["0:7 -", "500:107 C", "6:7 C", "0:7 -"]);
    ok(mkfs(&["--owner=3:4", "--inode-flags=nodatacow:home/user/notes"]));
    assert_eq!(seen(&paths), ["3:4 -", "3:4 -", "3:4 C", "3:4 -"]);
    // A file whose owner is in no range is named, and all others are copied.
    let done = mkfs(&["--map-users=0:0:1", "--map-users=1000:500:1"]);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    for part in ["notes': its user 100005 is in no range of --map-users", "1 file was not copied"] {
        assert!(!done.status.success() && said.contains(part), "{said}");
    }
    refused(&mkfs(&["--map-users=1:2"]), &["FROM:TO:COUNT"]);
    refused(&mkfs(&["--inode-flags=append:usr"]), &["nodatacow or nodatasum"]);
    refused(&mkfs(&["--inode-flags=nodatasum:none"]), &["does not exist", "nothing was made"]);
}

/// Exchanges pairs of names until it is told to stop.
fn exchange(dir: &Path, pairs: &[(String, String)], stop: &AtomicBool) {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    while !stop.load(Ordering::Relaxed) {
        for (one, other) in pairs {
            let _ = renameat_with(CWD, dir.join(one), CWD, dir.join(other), RenameFlags::EXCHANGE);
        }
    }
}

#[test]
fn a_tree_that_its_owner_changes_gives_only_its_own_content() {
    let dir = tempfile::tempdir().unwrap();
    let (tree, secret, secret_dir) = (dir.path().join("tree"), dir.path().join("secret"), dir.path().join("dir"));
    fs::create_dir(&tree).unwrap();
    fs::create_dir(&secret_dir).unwrap();
    for path in [secret.clone(), secret_dir.join("file")] {
        fs::write(path, "TOPSECRET").unwrap();
    }
    let mut pairs = Vec::new();
    for number in 0..150 {
        // Files and links to the secret, files and pipes, directories and links to the directory of a secret.
        let name = |kind: &str| format!("{kind}{number}");
        for kind in ["f", "g"] {
            fs::write(tree.join(name(kind)), "ordinary").unwrap();
        }
        std::os::unix::fs::symlink(&secret, tree.join(name("link"))).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, tree.join(name("pipe")), rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .unwrap();
        fs::create_dir(tree.join(name("d"))).unwrap();
        fs::write(tree.join(name("d")).join("file"), "ordinary").unwrap();
        std::os::unix::fs::symlink(&secret_dir, tree.join(name("way"))).unwrap();
        pairs.extend([("f", "link"), ("g", "pipe"), ("d", "way")].map(|(one, other)| (name(one), name(other))));
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| exchange(&tree, &pairs, &stop));
        for round in 0..6 {
            let image = dir.path().join("image");
            let _ = fs::remove_file(&image);
            let args = match round % 2 {
                0 => vec!["mkfs", "-q", "-b", "200M", "--rootdir", tree.to_str().unwrap(), image.to_str().unwrap()],
                _ => {
                    assert!(ubtrfs(["mkfs", "-q", "-b", "200M", image.to_str().unwrap()]).status.success());
                    vec!["cp", "-r", tree.to_str().unwrap(), image.to_str().unwrap()]
                }
            };
            let mut child = command(&args).stderr(std::process::Stdio::null()).spawn().unwrap();
            let begun = std::time::Instant::now();
            let status = loop {
                if let Some(status) = child.try_wait().unwrap() {
                    break status;
                }
                if begun.elapsed() > std::time::Duration::from_secs(60) {
                    let _ = child.kill();
                    stop.store(true, Ordering::Relaxed);
                    panic!("{args:?} hangs");
                }
                std::thread::sleep(std::time::Duration::from_millis(20));
            };
            // A name that was replaced is an error.
            assert!(status.code().is_some_and(|code| code < 2), "{status}");
            if image.exists() {
                let content = fs::read(&image).unwrap();
                let has_secret = content.windows(9).any(|bytes| bytes == b"TOPSECRET");
                if has_secret {
                    stop.store(true, Ordering::Relaxed);
                }
                assert!(!has_secret, "{args:?} copied the content of a file outside of the tree");
                assert!(btrfs_check(&image).is_ok());
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}
