//! Tests a newcomer's first steps: help, typing errors, sizes, operands that do not exist.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use crate::common::{ok, refused};
use serde_json::Value;
use tempfile::TempDir;

struct Bed(TempDir);

impl Bed {
    /// Makes `a.img` with `/f` and `/d/g`.
    fn new() -> Self {
        let bed = Self(tempfile::tempdir().unwrap());
        fs::create_dir_all(bed.join("root/d")).unwrap();
        fs::write(bed.join("root/f"), "content of f").unwrap();
        fs::write(bed.join("root/d/g"), "content of g").unwrap();
        ok(bed.run("mkfs -q -r root a.img"));
        bed
    }

    /// Runs a line that must fail with two errors, and returns its output.
    fn run_with_two_errors(&self, line: &str) -> String {
        let output = self.run(line);
        assert_eq!(output.status.code(), Some(1), "{line}");
        assert_eq!(stderr(&output).lines().count(), 2, "{line}: {}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, line: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
        command.args(line.split(' ')).current_dir(self.0.path()).stdin(Stdio::null()).output().unwrap()
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn help_is_found_however_it_is_asked_for() {
    let bed = Bed::new();
    assert_eq!(ok(bed.run("help")), ok(bed.run("--help")));
    assert!(ok(bed.run("help mkfs")).contains("--byte-count"));
    assert!(ok(bed.run("help subvolume list")).contains("Usage: ubtrfs subvolume list"));
    let text = stderr(&bed.run("mkfs --byte-cuont 1G x"));
    assert!(text.starts_with("ubtrfs: unexpected argument '--byte-cuont' found\n"), "{text}");
    assert!(text.contains("\n  tip: a similar argument exists: '--byte-count'\n"), "{text}");
    assert!(text.contains("\nUsage: ubtrfs mkfs") && text.ends_with("\nFor more, see: ubtrfs mkfs --help\n"), "{text}");
    let text = stderr(&bed.run("rm -x a.img:/f"));
    assert!(!text.contains("as a value"), "a path is no use of an option: {text}");
    assert!(stderr(&bed.run("subvolume lst")).contains("did you mean: ubtrfs subvolume list\n"));
}

#[test]
fn check_says_damaged_only_of_damaged_filesystems() {
    let bed = Bed::new();
    for line in ["check --repair a.img", "check --no-such-option a.img", "check", "check missing.img"] {
        assert_eq!(bed.run(line).status.code(), Some(2), "{line}");
    }
    assert!(stderr(&bed.run("check --repair a.img")).contains("--repair does not exist"));
    assert_eq!(bed.run("check a.img").status.code(), Some(0));
    assert_eq!(bed.run("check --help").status.code(), Some(0));
    assert!(ok(bed.run("check --help")).contains("2 if it could not be checked or an argument was wrong"));
}

#[test]
fn sizes_have_fractions_and_a_limit() {
    let bed = Bed::new();
    ok(bed.run("mkfs -q -b 1.5G new.img"));
    assert_eq!(fs::metadata(bed.join("new.img")).unwrap().len(), 3 << 29);
    for line in ["mkfs -q -b 8E x.img", "import --create 8E a.tar x.img:/", "mkfs -q -b 99999999999999999999E x.img"] {
        assert!(stderr(&bed.run(line)).contains("larger than any device"), "{line}");
    }
}

#[test]
fn an_image_that_failed_is_not_left() {
    let bed = Bed::new();
    // This size is larger than most host filesystems allow.
    refused(&bed.run("mkfs -q -b 7.9E x.img"), &["x.img"]);
    refused(&bed.run("mkfs -q -b 1M x.img"), &[]);
    refused(&bed.run("mkfs -q -r missing x.img"), &[]);
    ok(bed.run("export --output good.tar a.img:/"));
    let archive = fs::read(bed.join("good.tar")).unwrap();
    fs::write(bed.join("torn.tar"), &archive[..archive.len() - 2500]).unwrap();
    refused(&bed.run("import --create 7.9E good.tar x.img:/"), &[]);
    refused(&bed.run("import --create 1M good.tar x.img:/"), &["x.img"]);
    refused(&bed.run("import --create 200M torn.tar x.img:/"), &["torn.tar"]);
    refused(&bed.run("import --create 200M -o no-such-option good.tar x.img:/"), &["no-such-option"]);
    assert!(!bed.join("x.img").exists());
    // An existing image is not removed.
    refused(&bed.run("import --create 200M torn.tar a.img:/"), &["torn.tar"]);
    ok(bed.run("check a.img"));
}

#[test]
fn commands_go_on_after_an_operand_that_is_missing() {
    let bed = Bed::new();
    let tried = |line: &str| bed.run_with_two_errors(line);
    assert_eq!(tried("cat a.img:/missing a.img:/f no.img:/x"), "content of f");
    assert!(tried("ls a.img:/missing a.img:/d no.img:/").contains("g\n"));
    assert!(tried("stat a.img:/missing a.img:/f no.img:/x").contains("12 in"));
    fs::create_dir(bed.join("out")).unwrap();
    tried("cp a.img:/missing a.img:/f no.img:/x out");
    assert_eq!(fs::read(bed.join("out/f")).unwrap(), b"content of f");
    tried("mkdir a.img:/missing/x a.img:/made no.img:/x");
    tried("rm a.img:/missing a.img:/f no.img:/x");
    assert_eq!(ok(bed.run("ls a.img")), "d\nmade\n", "an image alone means its root");
    ok(bed.run("rm -f a.img:/missing"));
    ok(bed.run("check a.img"));
}

#[test]
fn o_means_mount_options() {
    let bed = Bed::new();
    for line in ["ls -o ro a.img:/", "export -o ro a.img:/", "export -o subvolid=5 -o ro --output a.tar a.img"] {
        assert!(bed.run(line).status.success(), "{line}");
    }
    // The option `-o` of `export` once named the output file, and still does if its value is not a mount option.
    ok(bed.run("export -o b.tar a.img:/"));
    assert!(fs::read(bed.join("a.tar")).unwrap() == fs::read(bed.join("b.tar")).unwrap());
}

#[test]
fn an_export_is_compressed_as_its_name_says() {
    let bed = Bed::new();
    ok(bed.run("export -f plain.tar a.img:/"));
    for (suffix, magic) in [
        ("tar.zst", &[0x28, 0xb5, 0x2f, 0xfd][..]),
        ("tgz", &[0x1f, 0x8b]),
        ("tar.xz", b"\xfd7zXZ"),
        ("tar.bz2", b"BZh"),
        ("tar.lz4", &[0x04, 0x22, 0x4d, 0x18]),
    ] {
        ok(bed.run(&format!("export -o x.{suffix} a.img:/")));
        let packed = fs::read(bed.join(&format!("x.{suffix}"))).unwrap();
        assert!(packed.starts_with(magic), "{suffix}");
        ok(bed.run(&format!("mkfs -q -b 200M {suffix}.img")));
        assert!(bed.run(&format!("import x.{suffix} {suffix}.img:/")).status.success());
        ok(bed.run(&format!("export -f again.tar {suffix}.img:/")));
        assert!(fs::read(bed.join("again.tar")).unwrap() == fs::read(bed.join("plain.tar")).unwrap(), "{suffix}");
    }
    refused(&bed.run("export -f x.tar.lzma a.img:/"), &["cannot compress"]);
    assert!(!bed.join("x.tar.lzma").exists());
}

#[test]
fn files_made_by_a_user_belong_to_the_user() {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        return;
    }
    let bed = Bed::new();
    std::os::unix::fs::chown(bed.0.path(), Some(4711), Some(4712)).unwrap();
    let root = Bed::new();
    let as_user = |line: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
        command.args(line.split(' ')).current_dir(bed.0.path()).stdin(Stdio::null());
        command.uid(4711).gid(4712).output().unwrap()
    };
    let owner = |bed: &Bed, path: &str| {
        let shown: Value = serde_json::from_str(&ok(bed.run(&format!("stat --json {path}")))).unwrap();
        (shown["uid"].as_u64().unwrap(), shown["gid"].as_u64().unwrap())
    };
    fs::create_dir(bed.join("in")).unwrap();
    fs::write(bed.join("in/f"), "f").unwrap();
    let tar = ["--owner=7", "--group=8", "--numeric-owner", "-C", "in", "-cf", "in.tar", "f"];
    assert!(Command::new("tar").args(tar).current_dir(bed.0.path()).status().unwrap().success());
    fs::copy(bed.join("in.tar"), root.join("in.tar")).unwrap();

    for line in [
        "mkfs -q -b 200M own.img",
        "mkdir own.img:/d",
        "mkdir -p own.img:/p/q",
        "subvolume create own.img:/s",
        "cp in.tar own.img:/c",
        "import in.tar own.img:/missing/t",
        "import --same-owner in.tar own.img:/kept/t",
        "import --owner 5:6 in.tar own.img:/given/t",
        "mkdir --owner 5:6 own.img:/e",
        "subvolume create --owner 5:6 own.img:/u",
    ] {
        let output = as_user(line);
        assert!(output.status.success(), "{line}: {}", stderr(&output));
    }
    for path in ["", "d", "p", "p/q", "s", "c", "missing", "missing/t", "missing/t/f", "kept", "kept/t"] {
        assert_eq!(owner(&bed, &format!("own.img:/{path}")), (4711, 4712), "/{path}");
    }
    assert_eq!(owner(&bed, "own.img:/kept/t/f"), (7, 8));
    for path in ["given", "given/t", "given/t/f", "e", "u"] {
        assert_eq!(owner(&bed, &format!("own.img:/{path}")), (5, 6), "/{path}");
    }
    ok(bed.run("check own.img"));

    // If root runs an import, files keep the owners that the archive states. Root owns everything else that its
    // commands make.
    for line in ["mkdir a.img:/e", "subvolume create a.img:/s", "import in.tar a.img:/missing"] {
        assert!(root.run(line).status.success(), "{line}");
    }
    for path in ["e", "s", "missing"] {
        assert_eq!(owner(&root, &format!("a.img:/{path}")), (0, 0), "/{path}");
    }
    assert_eq!(owner(&root, "a.img:/missing/f"), (7, 8));
    ok(root.run("check a.img"));
}

#[test]
fn the_root_directory_belongs_to_the_user_who_runs_mkfs() {
    let bed = Bed::new();
    let owner = |image: &str| {
        let shown: Value = serde_json::from_str(&ok(bed.run(&format!("stat --json {image}:/")))).unwrap();
        (shown["uid"].as_u64().unwrap(), shown["gid"].as_u64().unwrap())
    };
    let made = ok(bed.run("mkfs -b 200M --root-owner 7:8 given.img"));
    assert!(made.contains("owned by 7:8"), "{made}");
    assert_eq!(owner("given.img"), (7, 8));
    ok(bed.run("check given.img"));
    if rustix::process::geteuid().is_root() {
        ok(bed.run("mkfs -q -b 200M root.img"));
        assert_eq!(owner("root.img"), (0, 0));
        std::os::unix::fs::chown(bed.0.path(), Some(4711), Some(4712)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
        command.args(["mkfs", "-b", "200M", "own.img"]).current_dir(bed.0.path()).uid(4711).gid(4712);
        let made = ok(command.output().unwrap());
        assert!(made.contains("owned by 4711:4712"), "{made}");
        assert_eq!(owner("own.img"), (4711, 4712));
        ok(bed.run("check own.img"));
    }
}

#[test]
fn subvolume_commands_go_on_after_a_failure() {
    let bed = Bed::new();
    let tried = |line: &str| bed.run_with_two_errors(line);
    let made = tried("subvolume create no.img:/x a.img:/a a.img:/f a.img:/b");
    assert_eq!(made, "Create subvolume 'a.img:/a'\nCreate subvolume 'a.img:/b'\n");
    let deleted = tried("subvolume delete a.img:/a a.img:/nope a.img:/b no.img:/x");
    assert_eq!(deleted, "Delete subvolume 'a.img:/a'\nDelete subvolume 'a.img:/b'\n");
    if ubtrfs_testkit::capability::fuse() {
        fs::create_dir(bed.join("m")).unwrap();
        ok(bed.run("mount a.img m"));
        tried("subvolume create m/a m/f m/nowhere/x m/b");
        tried("subvolume delete m/a m/nope m/d m/b");
        assert_eq!(ok(bed.run("subvolume list m")), "");
        ok(bed.run("umount m"));
    }
    ok(bed.run("check a.img"));
}

#[test]
fn options_for_images_are_refused_in_a_mount() {
    if !ubtrfs_testkit::capability::fuse() {
        return;
    }
    let bed = Bed::new();
    fs::create_dir(bed.join("m")).unwrap();
    ok(bed.run("subvolume create a.img:/s"));
    ok(bed.run("mount a.img m"));
    for line in ["subvolume list --options bogus m", "subvolume list --memory 64M m", "filesystem label -o ro m"] {
        refused(&bed.run(line), &["m is in a mount", "-o and --memory"]);
    }
    // The remedy for a subvolume that is mounted leads to another mount, not to an option.
    refused(&bed.run("subvolume delete m"), &["m: it is the top level", "delete the files and subvolumes in it"]);
    ok(bed.run("umount m"));
    ok(bed.run("mount -o subvol=s a.img m"));
    refused(&bed.run("subvolume delete m"), &["root of the mount", "unmount it"]);
    ok(bed.run("umount m"));
    ok(bed.run("mount -o subvolid=5 a.img m"));
    ok(bed.run("subvolume delete m/s"));
    ok(bed.run("umount m"));
}

#[test]
fn an_image_can_be_synced_by_its_name() {
    let bed = Bed::new();
    for line in ["sync a.img", "filesystem sync a.img", "sync a.img:/"] {
        ok(bed.run(line));
    }
    refused(&bed.run("sync root"), &["neither in a mount"]);
}

#[test]
fn an_image_that_two_commands_make_is_made_once() {
    let bed = Bed::new();
    ok(bed.run("export --output a.tar a.img:/"));
    let spawn = |line: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
        command.args(line.split(' ')).current_dir(bed.0.path()).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut lost = 0;
    for _ in 0..4 {
        let both = [(); 2].map(|()| spawn("import --create=200M a.tar new.img:/")).map(|one| one.wait_with_output());
        for output in both.map(Result::unwrap).iter().filter(|output| !output.status.success()) {
            lost += 1;
            let said = stderr(output);
            assert!(said.contains("new.img exists already; choose") || said.contains("in use"), "{said}");
        }
        ok(bed.run("check new.img"));
        fs::remove_file(bed.join("new.img")).unwrap();
    }
    if !ubtrfs_testkit::capability::fuse() {
        return;
    }
    fs::create_dir(bed.join("m1")).unwrap();
    fs::create_dir(bed.join("m2")).unwrap();
    for _ in 0..4 {
        let both = [1, 2].map(|n| spawn(&format!("mount --create=200M new.img m{n}")));
        let both = both.map(|one| one.wait_with_output().unwrap());
        // The second one joins the first one's server, if it comes late enough.
        assert!(both.iter().any(|output| output.status.success()), "{both:?}");
        for (output, n) in both.iter().zip([1, 2]) {
            match output.status.success() {
                true => drop(ok(bed.run(&format!("umount m{n}")))),
                false => assert!(stderr(output).contains("new.img is in use by"), "{}", stderr(output)),
            }
        }
        fs::remove_file(bed.join("new.img")).unwrap();
    }
    println!("{lost} imports came second");
}

#[test]
fn labels_have_no_line_breaks() {
    let bed = Bed::new();
    let label = |text: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
        command.args(["filesystem", "label", "a.img", text]).current_dir(bed.0.path()).output().unwrap()
    };
    refused(&label("a\nb"), &["label", "line"]);
    ok(label("a b"));
    assert_eq!(ok(bed.run("filesystem label a.img")), "a b\n");
}
