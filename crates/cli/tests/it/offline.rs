//! Tests of the commands that need no mount, run as processes. Linux judges written images (`btrfs check`, mount,
//! scrub, comparison file by file). GNU tar and a walk of the host's files judge the output of reading commands.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;
use ubtrfs_device::{Access, FileDevice};
use ubtrfs_testkit::capability::{kernel_oracle, program};

use crate::common::{ok, refused};
use ubtrfs_testkit::{Compare, LoopMount, TreeEntry, compare_entries, compare_trees, judge, run as sh, walk_path};

/// The comparison covers all attributes that an archive keeps. The root directories of the two trees are not compared.
const ARCHIVED: Compare = Compare::COPY;

fn ready() -> bool {
    kernel_oracle() && program("tar")
}

fn ubtrfs<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ubtrfs")).args(args).stdin(Stdio::null()).output().unwrap()
}

struct Dir(TempDir);

impl Dir {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// `IMAGE:/path` for `disk.img` in this directory.
    fn at(&self, path: &str) -> String {
        format!("{}:{path}", self.join("disk.img").display())
    }
}

/// Makes a tree with files of each type that tar can store, and an archive of the tree.
fn archived() -> (Dir, PathBuf, String) {
    let dir = Dir::new();
    let root = dir.join("root");
    fill(&root);
    archive(&root, &dir.join("a.tar"), &["--format=pax"]);
    let tar = dir.join("a.tar").display().to_string();
    (dir, root, tar)
}

/// Makes a tree with files of each type that tar can store.
fn fill(root: &Path) {
    fs::create_dir_all(root.join("dir/sub/empty")).unwrap();
    fs::write(root.join("empty"), b"").unwrap();
    fs::write(root.join("small"), b"inline\n").unwrap();
    fs::write(root.join("dir/2048"), vec![b'x'; 2048]).unwrap();
    fs::write(root.join("dir/4097"), vec![b'y'; 4097]).unwrap();
    let big: Vec<u8> = (0..3_000_017u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    fs::write(root.join("dir/sub/big"), &big).unwrap();
    let long = root.join("d".repeat(200)).join("e".repeat(200));
    fs::create_dir_all(&long).unwrap();
    fs::write(long.join("f".repeat(255)), b"long").unwrap();
    let bytes = <OsStr as std::os::unix::ffi::OsStrExt>::from_bytes;
    fs::write(root.join(bytes(b"bytes\xff\xfe\n")), b"bytes").unwrap();
    symlink("small", root.join("link")).unwrap();
    symlink("t".repeat(3000), root.join("long link")).unwrap();
    symlink("../nowhere", root.join("dir/dangling")).unwrap();
    fs::hard_link(root.join("small"), root.join("dir/sub/hard")).unwrap();
    fs::hard_link(root.join("link"), root.join("dir/hard link to a link")).unwrap();
    fs::hard_link(root.join("dir/4097"), root.join("another hard")).unwrap();
    let sparse = File::create(root.join("sparse")).unwrap();
    for (offset, len) in [(0, 10), (1 << 20, 4096), (5 << 20, 100_000), (64 << 20, 1)] {
        sparse.write_all_at(&vec![b's'; len], offset).unwrap();
    }
    sparse.set_len((64 << 20) + 12345).unwrap();
    File::create(root.join("hole")).unwrap().set_len(3 << 20).unwrap();
    let name = |path: &str| root.join(path).display().to_string();
    sh("mkfifo", [name("dir/fifo")]).unwrap();
    sh("mknod", ["-m", "640", &name("dir/null"), "c", "1", "3"]).unwrap();
    sh("mknod", [&name("dir/disk"), "b", "8", "1000"]).unwrap();
    for (path, key, value) in [
        ("small", "user.name", "value"),
        ("small", "user.a=b%", "odd name"),
        ("dir", "user.dir", ""),
        ("dir/4097", "trusted.t", "0x00ff0a"),
        ("dir/4097", "security.capability", "0x0000000200200000000000000000000000000000"),
    ] {
        sh("setfattr", ["-n", key, "-v", value, &name(path)]).unwrap();
    }
    sh("setfattr", ["-n", "user.long", "-v", &"v".repeat(3000), &name("dir/sub/big")]).unwrap();
    for (path, mode, owner) in
        [("small", 0o4755, (1000, 100)), ("dir/sub", 0o3771, (70000, 1)), ("sparse", 0o000, (1, 3_000_000_000))]
    {
        std::os::unix::fs::chown(root.join(path), Some(owner.0), Some(owner.1)).unwrap();
        fs::set_permissions(root.join(path), fs::Permissions::from_mode(mode)).unwrap();
    }
    for (path, acl) in [("dir/sub/big", "u:1234:rx,g:root:r"), ("dir/2048", "m::r"), ("dir", "d:g:77:rwx,u:5:x")] {
        sh("setfacl", ["-m", acl, &name(path)]).unwrap();
    }
    for (path, time) in [
        ("small", "2001-02-03 04:05:06.789012345 UTC"),
        ("dir/sub", "1969-12-31 23:00:00.5 UTC"),
        ("hole", "2100-01-01 00:00:00.000000001 UTC"),
        ("dir", "1999-01-01 00:00:00 UTC"),
    ] {
        sh("touch", ["-h", "-d", time, &name(path)]).unwrap();
    }
    sh("touch", ["-h", "-d", "2011-11-11 11:11:11.1 UTC", &name("link")]).unwrap();
}

fn archive(root: &Path, tar: &Path, args: &[&str]) {
    let (root, tar) = (root.display().to_string(), tar.display().to_string());
    let mut all = vec!["-C", &root, "-cf", &tar, "--xattrs", "--xattrs-include=*", "--acls"];
    all.extend(args);
    all.push(".");
    sh("tar", all).unwrap();
}

/// Checks that `disk.img` is clean for Linux, and that the tree at `below` equals these entries.
fn judged(dir: &Dir, below: &str, expected: &[TreeEntry]) {
    judge(&dir.join("disk.img"), "", &[]).unwrap();
    let mount = LoopMount::new(&dir.join("disk.img"), "ro").unwrap();
    let found = walk_path(&mount.join(below)).unwrap();
    compare_entries(expected, &found, ARCHIVED).unwrap();
    mount.close().unwrap();
}

#[test]
fn linux_reads_imported_tar_archives() {
    if !ready() {
        return;
    }
    let dir = Dir::new();
    let root = dir.join("root");
    fill(&root);
    let expected = walk_path(&root).unwrap();
    let cases: &[(&str, &[&str])] = &[
        ("a.tar", &["--format=pax"]),
        ("b.tar.gz", &["--format=pax", "--sparse", "--sparse-version=0.0", "-z"]),
        ("c.tar.xz", &["--format=pax", "--sparse", "--sparse-version=0.1", "-J"]),
        ("d.tar.zst", &["--format=pax", "--sparse", "--sparse-version=1.0", "--zstd"]),
        ("e.tar", &["--format=pax", "--sparse", "--sparse-version=0.1"]),
        ("f.tar", &["--format=pax", "--sparse", "--sparse-version=1.0"]),
    ];
    for (index, (name, args)) in cases.iter().enumerate() {
        archive(&root, &dir.join(name), args);
        let tar = dir.join(name).display().to_string();
        let _ = fs::remove_file(dir.join("disk.img"));
        let summary = ok(ubtrfs(["import", "--create", "1G", "--json", &tar, &dir.at("/in/side")]));
        let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
        assert_eq!(summary["entries"], expected.len(), "{summary}");
        judged(&dir, "in/side", &expected);
        if index == 0 {
            // Import again over the result: everything is replaced, nothing is duplicated.
            ok(ubtrfs(["import", &tar, &dir.at("/in/side")]));
            judged(&dir, "in/side", &expected);
            continue;
        }
        // Holes stay holes.
        let stat = ok(ubtrfs(["stat", "--json", &dir.at("/in/side/sparse")]));
        let stat: serde_json::Value = serde_json::from_str(&stat).unwrap();
        assert!(stat["blocks"].as_u64().unwrap() < 1000, "{stat}");
    }
}

#[test]
fn older_formats_keep_the_attributes_they_can_express() {
    if !ready() {
        return;
    }
    let dir = Dir::new();
    let root = dir.join("root");
    fill(&root);
    // GNU tar's own formats have times in whole seconds, and no extended attributes.
    let plain = Compare { mtime: false, xattrs: false, ..ARCHIVED };
    for (format, sparse) in [("gnu", "--sparse"), ("oldgnu", "--sparse"), ("gnu", "--no-recursion")] {
        let tar = dir.join("a.tar").display().to_string();
        let source = root.display().to_string();
        let format = format!("--format={format}");
        let mut args = vec!["-C", &source, "-cf", &tar, &format];
        if sparse == "--sparse" {
            args.extend([sparse, "."])
        } else {
            args.extend(["dir", "small", "link"])
        }
        sh("tar", args).unwrap();
        let _ = fs::remove_file(dir.join("disk.img"));
        ok(ubtrfs(["import", "--create", "1G", &tar, &dir.at("/")]));
        judge(&dir.join("disk.img"), "", &[]).unwrap();
        let mount = LoopMount::new(&dir.join("disk.img"), "ro").unwrap();
        if sparse == "--sparse" {
            compare_trees(&root, mount.path(), plain).unwrap();
            let (old, new) =
                (fs::symlink_metadata(root.join("small")).unwrap(), fs::metadata(mount.join("small")).unwrap());
            assert_eq!(old.mtime(), new.mtime());
        } else {
            let dir_only = Compare { root: false, ..plain };
            let old = walk_path(&root.join("dir")).unwrap();
            let one_link = |mut entries: Vec<TreeEntry>| {
                // Links to files that were left out are expected to be missing.
                for entry in &mut entries {
                    (entry.nlink, entry.link_group) = (1, None);
                }
                entries
            };
            compare_entries(&one_link(old), &one_link(walk_path(&mount.join("dir")).unwrap()), dir_only).unwrap();
        }
        mount.close().unwrap();
    }
}

#[test]
fn an_export_equals_the_imported_archive() {
    if !ready() {
        return;
    }
    let dir = Dir::new();
    let root = dir.join("root");
    fill(&root);
    archive(&root, &dir.join("a.tar"), &["--format=pax", "--sparse"]);
    let input = File::open(dir.join("a.tar")).unwrap();
    // Import from a pipe.
    let import = Command::new(env!("CARGO_BIN_EXE_ubtrfs"))
        .args(["import", "--create", "1G", "-", &dir.at("/")])
        .stdin(input)
        .output()
        .unwrap();
    ok(import);
    for (index, args) in [&["-S"][..], &[]].into_iter().enumerate() {
        let out = dir.join(&format!("out{index}.tar"));
        let mut all = vec!["export".to_owned(), dir.at("/")];
        all.extend(args.iter().map(|arg| (*arg).to_owned()));
        let exported =
            Command::new(env!("CARGO_BIN_EXE_ubtrfs")).args(&all).stdout(File::create(&out).unwrap()).status().unwrap();
        assert!(exported.success());
        assert_eq!(fs::metadata(&out).unwrap().len() < 10 << 20, index == 0, "sparse files stay small with -S");
        let back = dir.join(&format!("back{index}"));
        fs::create_dir(&back).unwrap();
        let (back_text, out) = (back.display().to_string(), out.display().to_string());
        sh("tar", ["-C", &back_text, "-xpf", &out, "--numeric-owner", "--acls", "--xattrs", "--xattrs-include=*"])
            .unwrap();
        compare_trees(&root, &back, ARCHIVED).unwrap();
        // Also unpack with our own import, into another image.
        let again = dir.join("again.img");
        let _ = fs::remove_file(&again);
        ok(ubtrfs(["import", "--create", "1G", &out, &format!("{}:/", again.display())]));
        judge(&again, "", &[(&walk_path(&root).unwrap(), ARCHIVED)]).unwrap();
    }
    // Export a single file.
    let out = ubtrfs(["export", &dir.at("/dir/sub/big")]);
    assert!(out.status.success());
    let mut list = Command::new("tar").arg("-t").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    list.stdin.take().unwrap().write_all(&out.stdout).unwrap();
    assert_eq!(list.wait_with_output().unwrap().stdout, b"big\n");
}

#[test]
fn copies_in_and_out_are_equal() {
    if !ready() {
        return;
    }
    let dir = Dir::new();
    let root = dir.join("root");
    fill(&root);
    let expected = walk_path(&root).unwrap();
    let image = dir.join("disk.img").display().to_string();
    ok(ubtrfs(["mkfs", "-q", "-b", "1G", &image]));
    let source = root.display().to_string();
    ok(ubtrfs(["cp", "-a", &source, &dir.at("/copy")]));
    judged(&dir, "copy", &expected);
    // A copy inside the image shares data, so a second copy takes almost no space.
    ok(ubtrfs(["cp", "-a", &dir.at("/copy"), &dir.at("/second")]));
    judged(&dir, "copy", &expected);
    judged(&dir, "second", &expected);
    let mount = LoopMount::new(&dir.join("disk.img"), "ro").unwrap();
    let shared = sh("filefrag", ["-v", &mount.join("second/dir/sub/big").display().to_string()]).unwrap();
    assert!(shared.contains("shared"), "{shared}");
    mount.close().unwrap();
    // Copy back to the host, and into another image.
    let back = dir.join("back").display().to_string();
    ok(ubtrfs(["cp", "-a", &dir.at("/second"), &back]));
    compare_trees(&root, Path::new(&back), ARCHIVED).unwrap();
    let other = dir.join("other.img").display().to_string();
    ok(ubtrfs(["mkfs", "-q", "-b", "1G", &other]));
    ok(ubtrfs(["cp", "-a", &dir.at("/copy"), &format!("{other}:/copy")]));
    judge(Path::new(&other), "", &[]).unwrap();
    let mount = LoopMount::new(Path::new(&other), "ro").unwrap();
    compare_trees(&root, &mount.join("copy"), ARCHIVED).unwrap();
    mount.close().unwrap();
    // Copy one file to a new name and into a directory, through links.
    ok(ubtrfs(["cp", "--owner", "5:6", &format!("{source}/link"), &dir.at("/one")]));
    assert_eq!(ok(ubtrfs(["cat", &dir.at("/one")])), "inline\n");
    ok(ubtrfs(["cp", &dir.at("/one"), &format!("{source}/dir/2048"), &dir.at("/copy/dir/")]));
    assert_eq!(ok(ubtrfs(["cat", &dir.at("/copy/dir/one")])), "inline\n");
    let stat: serde_json::Value = serde_json::from_str(&ok(ubtrfs(["stat", "--json", &dir.at("/one")]))).unwrap();
    assert_eq!((&stat["uid"], &stat["gid"], &stat["type"]), (&5.into(), &6.into(), &"file".into()));
    refused(&ubtrfs(["cp", &dir.at("/copy"), &dir.at("/third")]), &["/copy", "-r"]);
    refused(&ubtrfs(["cp", "-r", &dir.at("/copy"), &dir.at("/copy/dir/x")]), &["into itself"]);
    refused(&ubtrfs(["cp", &dir.at("/nothing"), &back]), &["/nothing", "does not exist"]);
    refused(&ubtrfs(["cp", "/etc/passwd", "/tmp/x"]), &["IMAGE:/path"]);
    judge(&dir.join("disk.img"), "", &[]).unwrap();
}

#[test]
fn lists_and_contents_are_those_of_the_tree() {
    if !ready() {
        return;
    }
    let (dir, root, tar) = archived();
    ok(ubtrfs(["import", "--create", "1G", &tar, &dir.at("/")]));
    assert_eq!(
        ok(ubtrfs(["ls", &dir.at("/dir")])),
        "2048\n4097\ndangling\ndisk\nfifo\nhard link to a link\nnull\nsub\n"
    );
    let long = ok(ubtrfs(["ls", "-l", &dir.at("/dir")]));
    assert!(
        long.contains("crw-r----- 1") && long.contains(" 1, 3 ") && long.contains("dangling -> ../nowhere"),
        "{long}"
    );
    assert!(ok(ubtrfs(["ls", "-l", &dir.at("/small")])).contains("-rwsr-xr-x 2 1000 100 7 2001-02-03 04:05"));
    let all = ok(ubtrfs(["ls", "-R", &dir.at("/dir")]));
    assert!(all.contains("dir/sub/empty:\n") && all.contains("big\nempty\nhard\n"), "{all}");
    let json = ok(ubtrfs(["ls", "-R", "--json", &dir.at("/")]));
    let lines: Vec<serde_json::Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len() + 1, walk_path(&root).unwrap().len());
    let by_path = |path: &str| lines.iter().find(|line| line["path"] == path).unwrap();
    assert_eq!(by_path("/link")["target"], "small");
    assert_eq!(by_path("/dir/disk")["device"]["minor"], 1000);
    assert_eq!(by_path("/small")["mtime"]["nsec"], 789_012_345);
    let cat = ubtrfs(["cat", &dir.at("/dir/sub/big"), &dir.at("/link"), &dir.at("/hole")]);
    let mut expected = fs::read(root.join("dir/sub/big")).unwrap();
    expected.extend(b"inline\n");
    expected.resize(expected.len() + (3 << 20), 0);
    assert!(cat.status.success() && cat.stdout == expected);
    let stat = ok(ubtrfs(["stat", &dir.at("/small")]));
    for word in ["4755", "1000:100", "2001-02-03 04:05:06.789012345 UTC", "user.name (5 bytes)"] {
        assert!(stat.contains(word), "{word}: {stat}");
    }
    refused(&ubtrfs(["cat", &dir.at("/dir")]), &["directory"]);
    refused(&ubtrfs(["ls", &dir.at("/nothing")]), &["/nothing", "no such file"]);
    refused(&ubtrfs(["ls", "no-image"]), &["no-image does not exist"]);
    refused(&ubtrfs(["cat", "no-image"]), &["IMAGE:/path"]);
    refused(&ubtrfs(["ls", "missing.img:/"]), &["missing.img", "does not exist"]);
}

#[test]
fn directories_are_made_and_trees_removed() {
    if !ready() {
        return;
    }
    let (dir, _, tar) = archived();
    ok(ubtrfs(["import", "--create", "1G", &tar, &dir.at("/tree")]));
    ok(ubtrfs(["mkdir", "-p", "-m", "1700", "--owner", "7:8", &dir.at("/a/b/c"), &dir.at("/a/b")]));
    ok(ubtrfs(["mkdir", &dir.at("/a/x")]));
    refused(&ubtrfs(["mkdir", &dir.at("/a/x")]), &["exists"]);
    refused(&ubtrfs(["mkdir", &dir.at("/no/x")]), &["/no"]);
    let stat: serde_json::Value = serde_json::from_str(&ok(ubtrfs(["stat", "--json", &dir.at("/a/b/c")]))).unwrap();
    assert_eq!((&stat["mode"], &stat["uid"]), (&"1700".into(), &7.into()));
    refused(&ubtrfs(["rm", &dir.at("/tree")]), &["-r"]);
    refused(&ubtrfs(["rm", &dir.at("/tree/none")]), &["no such file"]);
    refused(&ubtrfs(["rm", "-r", &dir.at("/")]), &["root"]);
    ok(ubtrfs(["rm", "-f", &dir.at("/tree/none")]));
    ok(ubtrfs(["rm", &dir.at("/tree/small"), &dir.at("/tree/dir/fifo")]));
    ok(ubtrfs(["rm", "-r", &dir.at("/tree/dir"), &dir.at("/a")]));
    judge(&dir.join("disk.img"), "", &[]).unwrap();
    ok(ubtrfs(["rm", "-r", &dir.at("/tree")]));
    assert_eq!(ok(ubtrfs(["ls", &dir.at("/")])), "");
    judge(&dir.join("disk.img"), "", &[]).unwrap();
}

#[test]
fn an_archive_stays_inside_of_its_target() {
    if !ready() {
        return;
    }
    let dir = Dir::new();
    let root = dir.join("root");
    fs::create_dir_all(root.join("real")).unwrap();
    fs::write(root.join("f"), b"content").unwrap();
    let tar = |name: &str, args: &[&str]| {
        let (tar, root) = (dir.join(name).display().to_string(), root.display().to_string());
        let mut all = vec!["-C", &root, "-P", "-cf", &tar];
        all.extend(args);
        sh("tar", all).unwrap();
        tar
    };
    let up = tar("up.tar", &["--transform=s,^f$,../../../up,", "f"]);
    let refused_up = ubtrfs(["import", "--create", "512M", &up, &dir.at("/target")]);
    refused(&refused_up, &["'../../../up'", "contains '..'"]);
    assert_eq!(ok(ubtrfs(["ls", &dir.at("/")])), "target\n");
    assert_eq!(ok(ubtrfs(["ls", &dir.at("/target")])), "");
    // Absolute links in the target are resolved inside the target.
    symlink("/real", root.join("absolute")).unwrap();
    symlink("../../real", root.join("relative")).unwrap();
    let links = tar("links.tar", &["real", "absolute", "relative"]);
    ok(ubtrfs(["import", &links, &dir.at("/target")]));
    let through = tar("through.tar", &["--transform=s,^f$,absolute/one,", "f"]);
    ok(ubtrfs(["import", &through, &dir.at("/target")]));
    let through = tar("through.tar", &["--transform=s,^f$,relative/two,", "f"]);
    ok(ubtrfs(["import", &through, &dir.at("/target")]));
    assert_eq!(ok(ubtrfs(["ls", &dir.at("/target/real")])), "one\ntwo\n");
    // Test `--strip-components`.
    let deep = tar("deep.tar", &["--transform=s,^f$,a/b/c,", "f", "real"]);
    ok(ubtrfs(["import", "--strip-components", "2", &deep, &dir.at("/strip")]));
    assert_eq!(ok(ubtrfs(["ls", &dir.at("/strip")])), "c\n");
    judge(&dir.join("disk.img"), "", &[]).unwrap();
}

#[test]
fn a_file_that_comes_again_replaces_the_one_before() {
    if !ready() {
        return;
    }
    let dir = Dir::new();
    let root = dir.join("root");
    fs::create_dir(&root).unwrap();
    let tar = dir.join("a.tar").display().to_string();
    let root_name = root.display().to_string();
    // The archive has every name once for each round, with different contents and sizes. So the import meets a name
    // again while the data of the previous round is still being written.
    for round in 0..3u32 {
        for index in 0..200u32 {
            let len = (index * 977 + round * 50_021) % 300_000;
            let content: Vec<u8> = (0..len).map(|at| (at / 3 + index + round) as u8).collect();
            let name = root.join(format!("f{index}"));
            fs::write(&name, content).unwrap();
            let link = root.join(format!("l{index}"));
            let _ = fs::remove_file(&link);
            fs::hard_link(&name, link).unwrap();
            fs::set_permissions(&name, fs::Permissions::from_mode(0o600 + round)).unwrap();
        }
        sh("setfattr", ["-n", "user.heavy", "-v", &"h".repeat(3000), &format!("{root_name}/f7")]).unwrap();
        sh("tar", ["-C", &root_name, "--format=pax", "--xattrs", "-rf", &tar, "--sort=name", "."]).unwrap();
    }
    let expected = walk_path(&root).unwrap();
    ok(ubtrfs(["import", "--create", "1G", &tar, &dir.at("/")]));
    judged(&dir, "", &expected);
    // If one member in the middle fails, all members before it are complete.
    fs::write(root.join("f199"), vec![b'z'; 5_000_000]).unwrap();
    sh("tar", ["-C", &root_name, "-cf", &tar, "./f199", "./l3", "./f4"]).unwrap();
    fs::remove_file(dir.join("disk.img")).unwrap();
    ok(ubtrfs(["mkfs", "-b", "1G", &dir.join("disk.img").display().to_string()]));
    ok(ubtrfs(["mkdir", &dir.at("/l3")]));
    ok(ubtrfs(["mkdir", &dir.at("/l3/full")]));
    refused(&ubtrfs(["import", &tar, &dir.at("/")]), &["'./l3'", "directory of that name"]);
    assert_eq!(ok(ubtrfs(["cat", &dir.at("/f199")])).len(), 5_000_000);
    judge(&dir.join("disk.img"), "", &[]).unwrap();
}

#[test]
fn a_refused_import_prints_one_line() {
    if !ready() {
        return;
    }
    let dir = Dir::new();
    let name = |file: &str| dir.join(file).display().to_string();
    fs::create_dir(dir.join("root")).unwrap();
    fs::write(dir.join("root/f"), vec![b'x'; 100_000]).unwrap();
    archive(&dir.join("root"), &dir.join("a.tar"), &[]);
    fs::write(dir.join("text"), "no archive\n".repeat(1000)).unwrap();
    fs::write(dir.join("none"), "").unwrap();
    let whole = fs::read(dir.join("a.tar")).unwrap();
    fs::write(dir.join("cut.tar"), &whole[..50_000]).unwrap();
    fs::write(dir.join("a.zip"), b"PK\x03\x04AY&SY").unwrap();
    let create = |tar: &str| ubtrfs(["import", "--create", "512M", &name(tar), &dir.at("/")]);
    refused(&create("text"), &["text", "not a tar archive"]);
    refused(&create("none"), &["empty"]);
    refused(&create("a.zip"), &["bsdtar cf - @FILE"]);
    refused(&create("missing"), &["missing", "No such file"]);
    refused(&create("root"), &["is a directory"]);
    assert!(!dir.join("disk.img").exists(), "no image for an archive that is none");
    refused(&create("cut.tar"), &["cut.tar", "'./f'", "ends within its data"]);
    assert!(!dir.join("disk.img").exists(), "no image with half of an archive");
    ok(ubtrfs(["mkfs", "-q", "-b", "512M", &name("disk.img")]));
    refused(&create("cut.tar"), &["cut.tar", "'./f'", "ends within its data"]);
    judge(&dir.join("disk.img"), "", &[]).unwrap();
    refused(&ubtrfs(["import", &name("a.tar"), &format!("{}:/", name("text"))]), &["text"]);
    ok(ubtrfs(["import", &name("a.tar"), &name("disk.img")]));
    ok(ubtrfs(["import", &name("a.tar"), &dir.at("/")]));
    refused(&ubtrfs(["import", &name("a.tar"), &dir.at("/f")]), &["/f is not a directory"]);
    ok(ubtrfs(["rm", &dir.at("/f")]));
    ok(ubtrfs(["mkdir", &dir.at("/f")]));
    ok(ubtrfs(["mkdir", &dir.at("/f/full")]));
    refused(&ubtrfs(["import", &name("a.tar"), &dir.at("/")]), &["'./f'", "directory of that name"]);
    // Hold the image open as another ubtrfs process would.
    let open = FileDevice::open(&dir.join("disk.img"), Access::ReadWrite).unwrap();
    refused(&ubtrfs(["ls", &dir.at("/")]), &["in use"]);
    drop(open);
    judge(&dir.join("disk.img"), "", &[]).unwrap();
}

#[test]
fn members_are_left_out_and_named() {
    if !ready() {
        return;
    }
    let dir = Dir::new();
    let root = dir.join("root");
    for name in ["a/cache/x", "a/b/cache", "src/one.c", "src/one.o", "src/old/two.o", "keep/src/old.c", "[x]"] {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, name).unwrap();
    }
    archive(&root, &dir.join("a.tar"), &[]);
    let tar = dir.join("a.tar").display().to_string();
    let options = ["-x", "cache", "--exclude=*.o", "-x", "./src/ol*", "-x", "[[]x]", "-v"];
    let said = ok(ubtrfs(["import", "--create", "256M", &tar, &dir.at("/to")].into_iter().chain(options)));
    let mut names: Vec<&str> = said.lines().filter(|line| line.starts_with('.')).collect();
    names.sort_unstable();
    assert_eq!(names, ["./", "./a/", "./a/b/", "./keep/", "./keep/src/", "./src/", "./src/one.c"], "{said}");
    assert!(said.contains("imported 7 entries"), "{said}");
    judge(&dir.join("disk.img"), "", &[]).unwrap();
    let found = ok(ubtrfs(["find", &dir.at("/to"), "-type", "f"]));
    assert!(found.lines().count() == 1 && found.contains("/to/src/one.c"), "{found}");
    let done = ubtrfs(["import", "-v", "--json", &tar, &dir.at("/")]);
    assert_eq!(done.status.code(), Some(1), "{done:?}");
}

#[test]
fn an_image_that_is_full_says_so_and_stays_whole() {
    if !ready() {
        return;
    }
    let dir = Dir::new();
    fs::create_dir(dir.join("root")).unwrap();
    let big: Vec<u8> = (0..200 << 20).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    fs::write(dir.join("root/big"), &big).unwrap();
    archive(&dir.join("root"), &dir.join("a.tar"), &[]);
    let tar = dir.join("a.tar").display().to_string();
    ok(ubtrfs(["mkfs", "-q", "-b", "150M", &dir.join("disk.img").display().to_string()]));
    refused(&ubtrfs(["import", &tar, &dir.at("/")]), &["'./big'", "no space left"]);
    judge(&dir.join("disk.img"), "", &[]).unwrap();
}

#[test]
fn commands_open_the_devices_that_an_option_names() {
    if !ready() {
        return;
    }
    let dir = Dir::new();
    let script = "truncate -s 400M disk.img second.img; mkfs.btrfs -q -d raid0 -m raid1 disk.img second.img
        first=$(losetup -f --show disk.img); second=$(losetup -f --show second.img); mkdir m
        trap 'umount m; losetup -d $first $second' EXIT
        mount -o device=$second $first m; head -c 5000000 /dev/urandom > file; cp file m/; sync";
    sh("bash", ["-ec", &format!("cd {}; {script}", dir.join("").display())]).unwrap();
    let (image, second) = (dir.join("disk.img").display().to_string(), dir.join("second.img").display().to_string());
    let device = format!("device={second}");
    let read = ubtrfs(["cat", "-o", &device, &dir.at("/file")]);
    assert!(read.status.success() && read.stdout == fs::read(dir.join("file")).unwrap());
    let shown = ok(ubtrfs(["filesystem", "show", "-o", &device, &image]));
    assert!(shown.contains(&second) && !shown.contains("missing"), "{shown}");
    // Beside the first device, the second one is found without the option.
    assert!(ubtrfs(["cat", &dir.at("/file")]).stdout == read.stdout);
    fs::create_dir(dir.join("elsewhere")).unwrap();
    fs::rename(&second, dir.join("elsewhere/second.img")).unwrap();
    refused(&ubtrfs(["cat", &dir.at("/file")]), &["device 2"]);
    refused(&ubtrfs(["filesystem", "df", "-o", "device=/nonexistent", &image]), &["/nonexistent"]);
}
