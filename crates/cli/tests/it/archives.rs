//! Tests of archives that demand much memory, and of OCI image layers: memory is bounded for every archive, and
//! whiteouts are applied.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::common::{ok, refused};
use ubtrfs_testkit::capability::program;

/// Runs a command in a directory; `mib` is the limit of the command's address space in MiB; 0 means no limit.
fn run(dir: &Path, mib: u64, line: &str) -> Output {
    command(dir, mib, &format!("timeout 120 {} {line}", env!("CARGO_BIN_EXE_ubtrfs"))).output().unwrap()
}

fn command(dir: &Path, mib: u64, line: &str) -> Command {
    let limit = if mib == 0 { String::new() } else { format!("ulimit -v {}; ", mib << 10) };
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{limit}exec {line}")]).current_dir(dir).stdin(Stdio::null());
    command
}

fn header(name: &str, kind: u8, size: usize) -> Vec<u8> {
    let mut block = vec![0u8; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[100..107].copy_from_slice(b"0000755");
    block[108..115].copy_from_slice(b"0000000");
    block[116..123].copy_from_slice(b"0000000");
    block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    block[136..147].copy_from_slice(b"00000000000");
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar\x0000");
    summed(block)
}

/// Returns a header with its checksum filled in.
fn summed(mut block: Vec<u8>) -> Vec<u8> {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    block
}

/// Returns a header, its data, and the padding.
fn member(name: &str, kind: u8, data: &[u8]) -> Vec<u8> {
    let mut out = header(name, kind, data.len());
    out.extend(data);
    out.resize(out.len().next_multiple_of(512), 0);
    out
}

fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let mut len = rest + 1;
    while len != rest + len.to_string().len() {
        len = rest + len.to_string().len();
    }
    [format!("{len} {key}=").as_bytes(), value, b"\n"].concat()
}

/// Writes an archive compressed with zstd, which is much larger when it is decompressed. `long` is the base-2 logarithm
/// of the window's size in bytes.
fn packed(dir: &Path, name: &str, long: Option<u32>, write: &mut dyn FnMut(&mut dyn Write)) {
    let mut out = zstd::stream::write::Encoder::new(fs::File::create(dir.join(name)).unwrap(), 3).unwrap();
    if let Some(log) = long {
        out.long_distance_matching(true).unwrap();
        out.window_log(log).unwrap();
    }
    write(&mut out);
    out.write_all(&[0; 1024]).unwrap();
    out.finish().unwrap();
}

#[test]
fn no_archive_takes_more_memory_than_one_budget() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let large = vec![0u8; 60 << 20];
    // 40 directories, each with an extended attribute of 60 MiB.
    packed(dir, "directories.tar.zst", None, &mut |out| {
        for index in 0..40 {
            out.write_all(&member("x", b'x', &record("SCHILY.xattr.user.a", &large))).unwrap();
            out.write_all(&member(&format!("d{index}/"), b'5', b"")).unwrap();
        }
    });
    // Global headers, each with a different record.
    packed(dir, "global.tar.zst", None, &mut |out| {
        for index in 0..40 {
            out.write_all(&member("g", b'g', &record(&format!("comment{index}"), &large))).unwrap();
        }
        out.write_all(&member("f", b'0', b"")).unwrap();
    });
    // Two archives: in one, the headers of a member are together too large; in the other, many short records take more
    // memory than their bytes.
    packed(dir, "repeated.tar.zst", None, &mut |out| {
        for index in 0..40 {
            out.write_all(&member("x", b'x', &record(&format!("key{index}"), &large))).unwrap();
        }
        out.write_all(&member("f", b'0', b"")).unwrap();
    });
    packed(dir, "records.tar.zst", None, &mut |out| {
        let records: Vec<u8> = (0..4_000_000).flat_map(|index: u32| record(&format!("{index:x}"), b"x")).collect();
        out.write_all(&member("x", b'x', &records)).unwrap();
        out.write_all(&member("f", b'0', b"")).unwrap();
    });
    packed(dir, "map.tar.zst", None, &mut |out| {
        let map = [b"12000000\n".to_vec(), b"0\n0\n".repeat(12_000_000)].concat();
        let head =
            [record("GNU.sparse.major", b"1"), record("GNU.sparse.minor", b"0"), record("GNU.sparse.realsize", b"9")];
        out.write_all(&member("x", b'x', &head.concat())).unwrap();
        out.write_all(&member("f", b'0', &map)).unwrap();
    });
    packed(dir, "path.tar.zst", None, &mut |out| {
        out.write_all(&member("x", b'x', &record("path", &b"d/".repeat(1 << 20)))).unwrap();
        out.write_all(&member("f", b'0', b"")).unwrap();
    });
    // An archive that contains a file of zeros, and that needs a window of 2 GiB to decompress.
    packed(dir, "window.tar.zst", Some(31), &mut |out| {
        out.write_all(&header("f", b'0', 600 << 20)).unwrap();
        (0..10).for_each(|_| out.write_all(&large).unwrap());
    });
    ok(run(dir, 0, "mkfs -q -b 1G a.img"));
    for name in ["directories", "global", "repeated", "records", "map", "path", "window"] {
        let archive = format!("{name}.tar.zst");
        assert!(fs::metadata(dir.join(&archive)).unwrap().len() < 12 << 20, "{name}");
        // The limit is on address space, in which threads' stacks and the allocator's arenas count in full.
        let (output, peak) = run_with_peak(dir, 2048, &format!("import --memory 64M {archive} a.img:/{name}"));
        refused(&output, &[]);
        assert!(peak < 500, "{name}: {peak} MiB");
        ok(run(dir, 0, "check a.img"));
    }
}

/// The result of a command, as of [`run`], and its peak resident memory in MiB. It may print only a few lines.
fn run_with_peak(dir: &Path, mib: u64, line: &str) -> (Output, u64) {
    let mut command = command(dir, mib, &format!("{} {line}", env!("CARGO_BIN_EXE_ubtrfs")));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let kib =
            text.lines().find_map(|line| line.strip_prefix("VmHWM:")).and_then(|rest| rest.split_whitespace().next());
        peak = peak.max(kib.and_then(|kib| kib.parse().ok()).unwrap_or(0));
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    (child.wait_with_output().unwrap(), peak >> 10)
}

/// Makes an archive of `members`, in their order. `d/` is a directory, `l -> target` a symbolic link, `h => target` a
/// hard link, and any other text a file whose content is its name.
fn archive(dir: &Path, name: &str, members: &[&str]) {
    let mut out = Vec::new();
    for text in members {
        if let Some((path, target)) = text.split_once(" -> ").or_else(|| text.split_once(" => ")) {
            let mut block = header(path, if text.contains(" -> ") { b'2' } else { b'1' }, 0);
            block[157..157 + target.len()].copy_from_slice(target.as_bytes());
            out.extend(summed(block));
        } else if text.ends_with('/') {
            out.extend(member(text, b'5', b""));
        } else {
            out.extend(member(text, b'0', text.as_bytes()));
        }
    }
    out.extend([0; 1024]);
    fs::write(dir.join(name), out).unwrap();
}

/// As with tar, a link or directory is no longer followed after another member has replaced it.
#[test]
fn a_member_that_was_replaced_leads_nowhere() {
    let cases: [(&[&str], &[&str]); 4] = [
        (&["x/", "y/", "a -> x", "a/f", "a -> y", "a/g"], &["/a", "/x", "/x/f", "/y", "/y/g"]),
        (&["x/", "x/b/", "a -> x", "a/b/f", "a/", "a/b/g"], &["/a", "/a/b", "/a/b/g", "/x", "/x/b", "/x/b/f"]),
        (
            &["x/", "y/", "y/b/", "a -> x", "a/b/f", "l -> y", "a => l", "a/b/g"],
            &["/a", "/l", "/x", "/x/b", "/x/b/f", "/y", "/y/b", "/y/b/g"],
        ),
        (&["x/", "y/", "m -> x", "a -> m", "a/f", "m -> y", "a/g"], &["/a", "/m", "/x", "/x/f", "/y", "/y/g"]),
    ];
    for (members, expected) in cases {
        for option in ["", "--oci-layer "] {
            let dir = tempfile::tempdir().unwrap();
            let dir = dir.path();
            archive(dir, "a.tar", members);
            ok_but_output(&run(dir, 0, &format!("import --create 200M {option}a.tar a.img:/")));
            assert_eq!(paths(dir), expected, "{option}{members:?}");
            ok(run(dir, 0, "check a.img"));
        }
    }
    // If a name is a regular file, or a regular file has replaced a link or directory of that name, importing a member
    // below the name fails.
    let not_dirs: [(&str, &[&str]); 3] =
        [("", &["a", "a/g"]), ("", &["x/", "a -> x", "a/f", "a", "a/g"]), ("--oci-layer ", &["a/", "a", "a/g"])];
    for (option, members) in not_dirs {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        archive(dir, "a.tar", members);
        ok(run(dir, 0, "mkfs -q -b 200M a.img"));
        refused(&run(dir, 0, &format!("import {option}a.tar a.img:/")), &["'a/g'", "'a' is not a directory"]);
        ok(run(dir, 0, "check a.img"));
    }
}

#[test]
fn a_hard_link_does_not_remove_its_own_target() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    archive(dir, "lower.tar", &["a/", "a/b", "a/c/", "a/c/d", "s -> a/c", "e/", "e/f", "g"]);
    ok_but_output(&run(dir, 0, "import --create 200M lower.tar a.img:/"));
    let before = paths(dir);
    for link in ["a => a/b", "a => a/c/d", "a => s/d"] {
        archive(dir, "layer.tar", &[link]);
        let output = run(dir, 0, "import --oci-layer layer.tar a.img:/");
        refused(&output, &["'a'", "is in the directory that it would replace"]);
        assert_eq!(paths(dir), before, "{link}");
    }
    archive(dir, "layer.tar", &["g => a"]);
    refused(&run(dir, 0, "import --oci-layer layer.tar a.img:/"), &["is a directory"]);
    assert_eq!(paths(dir), before);
    // The layer replaces the directory `e` by a hard link to a file in another directory.
    archive(dir, "layer.tar", &["e => a/b"]);
    ok_but_output(&run(dir, 0, "import --oci-layer layer.tar a.img:/"));
    assert_eq!(ok(run(dir, 0, "cat a.img:/e")), "a/b");
    ok(run(dir, 0, "check a.img"));
}

/// If a member is refused or incomplete, an existing file of that name is kept.
#[test]
fn a_member_that_fails_removes_nothing() {
    let long = "x".repeat(4095);
    let too_long = |path: &str| {
        let record = record("linkpath", format!("{long}{long}").as_bytes());
        [member("pax", b'x', &record), header(path, b'2', 0)].concat()
    };
    // A device number that Linux does not have.
    let no_device = |path: &str| {
        let mut block = header(path, b'3', 0);
        block[329..336].copy_from_slice(b"7777777");
        summed(block)
    };
    // The header states more data than the archive has.
    let torn = |path: &str| [header(path, b'0', 100_000), vec![7; 50_000]].concat();
    let small = |path: &str| member(path, b'0', b"new");
    let hard_link = |path: &str, target: &str| {
        let mut block = header(path, b'1', 0);
        block[157..157 + target.len()].copy_from_slice(target.as_bytes());
        summed(block)
    };
    let layer = "--oci-layer ";
    let cases: [(&str, Vec<u8>, &[&str]); 13] = [
        (layer, [small("d/new"), small("d")].concat(), &["/d/new"]),
        (layer, [small("d/sub/new"), small("d")].concat(), &["/d/sub/new"]),
        (layer, [small("d/sub/new"), no_device("d")].concat(), &["/d/sub/new"]),
        (layer, too_long("d"), &[]),
        (layer, no_device("d"), &[]),
        (layer, torn("d"), &[]),
        (layer, hard_link("d", "missing"), &[]),
        (layer, hard_link("d", "d/f"), &[]),
        (layer, torn("f"), &[]),
        ("", torn("f"), &[]),
        ("", too_long("f"), &[]),
        ("", too_long("l"), &[]),
        ("", small("d"), &[]),
    ];
    for (nr, (option, mut bytes, brought)) in cases.into_iter().enumerate() {
        for compress in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let dir = dir.path();
            archive(dir, "lower.tar", &["d/", "d/f", "d/sub/", "d/sub/g", "f", "l -> f"]);
            ok_but_output(&run(dir, 0, "import --create 200M lower.tar a.img:/"));
            let mut expected = paths(dir);
            expected.extend(brought.iter().map(|path| (*path).to_owned()));
            expected.sort();
            if compress {
                bytes = zstd::encode_all(&bytes[..], 1).unwrap();
            }
            fs::write(dir.join("a.tar"), &bytes).unwrap();
            refused(&run(dir, 0, &format!("import {option}a.tar a.img:/")), &["a.tar"]);
            assert_eq!(paths(dir), expected, "case {nr}");
            for file in ["d/f", "d/sub/g", "f"] {
                assert_eq!(ok(run(dir, 0, &format!("cat a.img:/{file}"))), file, "case {nr}");
            }
            assert!(ok(run(dir, 0, "stat a.img:/l")).contains("-> f"));
            ok(run(dir, 0, "check a.img"));
        }
    }
    // A file is replaced by a link, a link by a file, a link by a directory, and a hard link by another hard link.
    for option in ["", layer] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        archive(dir, "lower.tar", &["d/", "d/f", "f", "l -> f", "m -> d", "h => f"]);
        ok_but_output(&run(dir, 0, "import --create 200M lower.tar a.img:/"));
        archive(dir, "a.tar", &["f -> d", "l", "m/", "m/n", "h => d/f"]);
        ok_but_output(&run(dir, 0, &format!("import {option}a.tar a.img:/")));
        assert_eq!(paths(dir), ["/d", "/d/f", "/f", "/h", "/l", "/m", "/m/n"]);
        assert_eq!(ok(run(dir, 0, "cat a.img:/l a.img:/h")), "ld/f");
        assert!(ok(run(dir, 0, "stat a.img:/f")).contains("-> d"));
        ok(run(dir, 0, "check a.img"));
    }
}

#[track_caller]
fn ok_but_output(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn tar(dir: &Path, name: &str, members: &[&str]) {
    let status = Command::new("tar")
        .args(["--no-recursion", "-cf", name, "-C", "layer"])
        .args(members)
        .current_dir(dir)
        .status();
    assert!(status.unwrap().success());
}

/// Lists the paths below an image's root.
fn paths(dir: &Path) -> Vec<String> {
    let listed = ok(run(dir, 0, "ls -R --json a.img:/"));
    let mut paths: Vec<String> = listed
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["path"].as_str().unwrap().to_owned())
        .collect();
    paths.sort();
    paths
}

#[test]
fn layers_hide_the_files_that_whiteouts_name() {
    if !program("tar") {
        return;
    }
    // The layer's own files are kept, both if its whiteouts come first and if they come last.
    for is_last in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let write = |path: &str| {
            let path = dir.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        };
        for path in
            ["a/x", "a/y", "a/deep/er/z", "b/f", "c/old", "c/both/old", "c/sub/old", "d/in", "e", "keep", "mixed/old"]
        {
            write(&format!("lower/{path}"));
        }
        let made =
            Command::new("tar").args(["-cf", "lower.tar", "-C", "lower", "."]).current_dir(dir).status().unwrap();
        assert!(made.success());
        for path in ["a/new", "a/.wh.x", "a/.wh.deep", ".wh.b", ".wh.missing", "c/.wh..wh..opq", "c/new", "c/both/new"]
        {
            write(&format!("layer/{path}"));
        }
        // A file replaces a directory, a directory replaces a file, and AUFS's internal whiteouts are ignored.
        for path in ["d", "e/in", ".wh..wh.plnk", "mixed/new", ".wh.mixed"] {
            write(&format!("layer/{path}"));
        }
        let whiteouts =
            ["a/.wh.x", "a/.wh.deep", ".wh.b", ".wh.missing", "c/.wh..wh..opq", ".wh..wh.plnk", ".wh.mixed"];
        let brought = ["a/new", "c/new", "c/both", "c/both/new", "d", "e", "e/in", "mixed", "mixed/new"];
        let members =
            if is_last { [&brought[..], &whiteouts[..]].concat() } else { [&whiteouts[..], &brought[..]].concat() };
        tar(dir, "layer.tar", &members);
        assert!(run(dir, 0, "import --create 200M lower.tar a.img:/").status.success());
        fs::copy(dir.join("a.img"), dir.join("plain.img")).unwrap();
        let said = ok(run(dir, 0, "import --oci-layer --json layer.tar a.img:/"));
        assert!(said.contains("\"whiteouts\":7"), "{said}");
        let expected = [
            "/a",
            "/a/new",
            "/a/y",
            "/c",
            "/c/both",
            "/c/both/new",
            "/c/new",
            "/d",
            "/e",
            "/e/in",
            "/keep",
            "/mixed",
            "/mixed/new",
        ];
        assert_eq!(paths(dir), expected, "whiteouts come last: {is_last}");
        ok(run(dir, 0, "check a.img"));
        // Without `--oci-layer`, whiteouts are ordinary files.
        refused(&run(dir, 0, "import layer.tar plain.img:/"), &["directory of that name exists"]);
    }
}

#[test]
fn a_dash_exports_to_standard_output() {
    let dir = tempfile::tempdir().unwrap();
    ok(run(dir.path(), 0, "mkfs -q -b 128M i.img"));
    ok(run(dir.path(), 0, "mkdir i.img:/d"));
    let plain = run(dir.path(), 0, "export i.img");
    let dashed = run(dir.path(), 0, "export i.img -f -");
    assert!(dashed.status.success() && !plain.stdout.is_empty() && dashed.stdout == plain.stdout, "{dashed:?}");
    assert!(!dir.path().join("-").exists(), "a file of that name was written");
}

/// Concatenates members into an archive and appends the end-of-archive blocks.
fn joined(members: &[Vec<u8>]) -> Vec<u8> {
    [members.concat(), vec![0; 1024]].concat()
}

#[test]
fn a_member_that_cannot_be_unpacked_stops_no_other() {
    if !program("btrfs") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let long = [record("path", &[b'n'; 256])].concat();
    let members = [
        member("first", b'0', b"1"),
        [member("pax", b'x', &long), member("short", b'0', b"the data of a member that is passed over")].concat(),
        member("d/", b'5', b""),
        member("up/../escaped", b'0', b"2"),
        member("../outside", b'0', b"3"),
        member("full/", b'5', b""),
        member("full/f", b'0', b"4"),
        member("d", b'0', b"in place of an empty directory"),
        member("full", b'0', b"5"),
        member("last", b'0', b"6"),
    ];
    fs::write(dir.path().join("a.tar"), joined(&members)).unwrap();
    fs::write(dir.path().join("packed.tar.zst"), zstd::encode_all(&joined(&members)[..], 3).unwrap()).unwrap();
    for (tar, image) in [("a.tar", "a.img"), ("packed.tar.zst", "b.img")] {
        let output = run(dir.path(), 0, &format!("import --create 200M {tar} {image}:/"));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        let lines: Vec<&str> = stderr.lines().collect();
        assert_eq!(lines.len(), 4, "{stderr}");
        for (line, words) in lines.iter().zip(["too long", "'..'", "'..'", "not empty"]) {
            assert!(line.starts_with("ubtrfs: cannot import") && line.contains(words), "{stderr}");
        }
        assert!(String::from_utf8_lossy(&output.stdout).contains("6 entries"), "{output:?}");
        assert_eq!(ok(run(dir.path(), 0, &format!("ls {image}:/"))), "d\nfirst\nfull\nlast\n");
        assert_eq!(ok(run(dir.path(), 0, &format!("cat {image}:/d"))), "in place of an empty directory");
        assert_eq!(ok(run(dir.path(), 0, &format!("cat {image}:/last"))), "6");
        ubtrfs_testkit::btrfs_check(&dir.path().join(image)).unwrap();
    }
}
