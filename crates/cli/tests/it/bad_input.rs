//! Tests of bad input: a one-line error that says what to do, exit status 1, and an unchanged image.
//!
//! Method: the test runs the built program as a user would. A run of more than a minute counts as a hang. The image's
//! bytes are hashed before and after.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;
use ubtrfs_format::CsumType;
use ubtrfs_testkit::{Image, LoopMount, Rng, btrfs_check, capability};

use crate::common::namespace;

const UBTRFS: &str = env!("CARGO_BIN_EXE_ubtrfs");

/// Runs a command line for at most a minute.
fn run_with(program: &[&OsStr], input: &[u8]) -> Output {
    let mut child = Command::new("timeout")
        .args(["-k", "5", "60"])
        .args(program)
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    // Writing fails if the program fails early and closes its input.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

fn ubtrfs(args: &[&OsStr], input: &[u8]) -> Output {
    let mut program = vec![OsStr::new(UBTRFS)];
    program.extend_from_slice(args);
    run_with(&program, input)
}

/// Returns the line of an error. Panics if there is not exactly one line, or if the exit status is not 1.
fn error_line(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.len() == 1 && lines[0].starts_with("ubtrfs: "), "not one line: {text}");
    assert!(!text.contains("panicked"), "{text}");
    lines[0].to_owned()
}

fn inside(image: &Path, path: &str) -> OsString {
    let mut name = image.as_os_str().to_owned();
    name.push(":");
    name.push(path);
    name
}

/// An empty tar archive.
const NO_FILES: &[u8] = &[0; 1024];

/// Checks that `ls`, `mkdir`, `import`, `export` and `mount` refuse this image and leave it unchanged. Returns the
/// error lines.
fn refused(image: &Image) -> Vec<String> {
    let before = image.digest().unwrap();
    let dir = TempDir::new().unwrap();
    let (path, root, new) = (image.path().as_os_str(), inside(image.path(), "/"), inside(image.path(), "/new"));
    let mut commands: Vec<Vec<&OsStr>> = vec![
        vec!["ls".as_ref(), &root],
        vec!["mkdir".as_ref(), &new],
        vec!["import".as_ref(), "-".as_ref(), &root],
        vec!["export".as_ref(), &root],
    ];
    if Path::new("/dev/fuse").exists() {
        commands.push(vec!["mount".as_ref(), path, dir.path().as_os_str()]);
    }
    let lines = commands.iter().map(|args| error_line(&ubtrfs(args, NO_FILES))).collect();
    assert_eq!(before, image.digest().unwrap(), "the image was changed");
    lines
}

fn made() -> Image {
    let image = Image::empty(256 << 20).unwrap();
    let output = ubtrfs(&["mkfs".as_ref(), "-q".as_ref(), image.path().as_os_str()], &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    image
}

#[test]
fn files_without_a_btrfs_are_refused() {
    for line in refused(&Image::empty(256 << 20).unwrap()) {
        assert!(line.contains("btrfs"), "{line}");
    }
    let noise = Image::empty(4 << 20).unwrap();
    noise.write_at(0, &Rng::new(1).bytes(4 << 20)).unwrap();
    refused(&noise);
    for len_bytes in [0, 1, 4096, 65_536, 65_536 + 4095] {
        refused(&Image::empty(len_bytes).unwrap());
    }
}

#[test]
fn a_truncated_image_is_refused() {
    for len_bytes in [70_000, 1 << 20, 5 << 20, 100 << 20, (256 << 20) - 4096] {
        let image = made();
        fs::File::options().write(true).open(image.path()).unwrap().set_len(len_bytes).unwrap();
        refused(&image);
    }
}

#[test]
fn missing_images_and_wrong_kinds_of_files_are_refused() {
    let dir = TempDir::new().unwrap();
    let missing = dir.path().join("missing.img");
    for args in [["ls", "/"], ["mkdir", "/x"], ["export", "/"]] {
        let path = inside(&missing, args[1]);
        let line = error_line(&ubtrfs(&[args[0].as_ref(), &path], NO_FILES));
        assert!(line.contains("missing.img"), "{line}");
    }
    let line = error_line(&ubtrfs(&["mount".as_ref(), missing.as_os_str(), dir.path().as_os_str()], &[]));
    assert!(line.contains("missing.img"), "{line}");
    assert!(!missing.exists());
    error_line(&ubtrfs(&["ls".as_ref(), &inside(dir.path(), "/")], &[]));
    error_line(&ubtrfs(&["mkfs".as_ref(), dir.path().as_os_str()], &[]));
    error_line(&ubtrfs(&["mkfs".as_ref(), missing.as_os_str()], &[]));
    assert!(!missing.exists());
}

#[test]
fn a_path_that_is_not_in_the_image_is_an_error() {
    let image = made();
    let before = image.digest().unwrap();
    for command in ["ls", "cat", "stat", "rm", "export", "find", "getfattr"] {
        let line = error_line(&ubtrfs(&[command.as_ref(), &inside(image.path(), "/no/such")], &[]));
        assert!(line.contains("/no"), "{line}");
    }
    assert_eq!(before, image.digest().unwrap());
}

#[test]
fn a_mount_point_that_does_not_fit_is_refused() {
    if !capability::fuse() {
        return;
    }
    let image = made();
    let before = image.digest().unwrap();
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("file"), b"in the way").unwrap();
    for point in [dir.path().to_owned(), dir.path().join("file"), dir.path().join("missing")] {
        let line = error_line(&ubtrfs(&["mount".as_ref(), image.path().as_os_str(), point.as_os_str()], &[]));
        assert!(line.contains(point.to_str().unwrap()), "{line}");
    }
    assert_eq!(before, image.digest().unwrap());
}

#[test]
fn an_option_that_is_not_known_is_refused() {
    if !capability::fuse() {
        return;
    }
    let image = made();
    let before = image.digest().unwrap();
    let dir = TempDir::new().unwrap();
    for options in ["no-such-option", "compress=gzip", "subvol=/nowhere", "subvolid=4711", "commit=soon"] {
        let args =
            ["mount".as_ref(), "-o".as_ref(), options.as_ref(), image.path().as_os_str(), dir.path().as_os_str()];
        error_line(&ubtrfs(&args, &[]));
    }
    assert_eq!(before, image.digest().unwrap());
}

#[test]
fn an_existing_filesystem_is_not_overwritten_without_force() {
    let image = made();
    let before = image.digest().unwrap();
    let line = error_line(&ubtrfs(&["mkfs".as_ref(), image.path().as_os_str()], &[]));
    assert!(line.contains("-f"), "{line}");
    assert_eq!(before, image.digest().unwrap());
}

#[test]
fn an_image_in_use_is_refused() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = made();
    let mount = LoopMount::new(image.path(), "").unwrap();
    for args in [["mkdir", "/new"], ["rm", "/new"]] {
        let line = error_line(&ubtrfs(&[args[0].as_ref(), &inside(image.path(), args[1])], &[]));
        assert!(line.contains("mounted"), "{line}");
    }
    error_line(&ubtrfs(&["mkfs".as_ref(), "-f".as_ref(), image.path().as_os_str()], &[]));
    mount.close().unwrap();
    btrfs_check(image.path()).unwrap();
}

#[test]
fn a_full_filesystem_says_so_and_stays_clean() {
    if !capability::kernel_oracle() {
        return;
    }
    let source = TempDir::new().unwrap();
    fs::write(source.path().join("large"), Rng::new(2).bytes(300 << 20)).unwrap();
    let tar = Command::new("tar").arg("c").arg("-C").arg(source.path()).arg("large").output().unwrap().stdout;
    let image = made();
    let root = inside(image.path(), "/");
    let line = error_line(&ubtrfs(&["import".as_ref(), "-".as_ref(), &root], &tar));
    assert!(line.to_lowercase().contains("space"), "{line}");
    btrfs_check(image.path()).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    mount.scrub().unwrap();
}

#[test]
fn unknown_features_are_refused_by_their_bit() {
    for bit in [17, 40, 63] {
        let image = made();
        image.patch_superblocks(|raw| raw[188 + bit / 8] |= 1 << (bit % 8)).unwrap();
        for line in refused(&image) {
            assert!(line.contains(&format!("{:#x}", 1u64 << bit)) || line.contains(&bit.to_string()), "{line}");
        }
    }
    // An image with an unknown compat_ro feature may be read.
    let image = made();
    image.patch_superblocks(|raw| raw[180 + 5] |= 1).unwrap();
    let before = image.digest().unwrap();
    assert!(ubtrfs(&["ls".as_ref(), &inside(image.path(), "/")], &[]).status.success());
    error_line(&ubtrfs(&["mkdir".as_ref(), &inside(image.path(), "/new")], &[]));
    assert_eq!(before, image.digest().unwrap());
}

/// Fields of the superblock: name, offset, size, and whether any other value must be refused.
const FIELDS: &[(&str, usize, usize, bool)] = &[
    ("fsid", 32, 16, true),
    ("bytenr", 48, 8, true),
    ("flags", 56, 8, false),
    ("magic", 64, 8, true),
    ("generation", 72, 8, true),
    ("root", 80, 8, true),
    ("chunk_root", 88, 8, true),
    ("log_root", 96, 8, false),
    ("log_root_transid", 104, 8, false),
    ("total_bytes", 112, 8, false),
    ("bytes_used", 120, 8, false),
    ("root_dir_objectid", 128, 8, false),
    ("num_devices", 136, 8, false),
    ("sectorsize", 144, 4, true),
    ("nodesize", 148, 4, true),
    ("leafsize", 152, 4, false),
    ("stripesize", 156, 4, false),
    ("sys_chunk_array_size", 160, 4, true),
    ("chunk_root_generation", 164, 8, true),
    ("compat_flags", 172, 8, false),
    ("compat_ro_flags", 180, 8, false),
    ("incompat_flags", 188, 8, false),
    ("csum_type", 196, 2, true),
    ("root_level", 198, 1, true),
    ("chunk_root_level", 199, 1, true),
    ("log_root_level", 200, 1, false),
    ("dev_item.devid", 201, 8, false),
    ("dev_item.total_bytes", 209, 8, false),
    ("dev_item.bytes_used", 217, 8, false),
    ("dev_item.io_align", 225, 4, false),
    ("dev_item.io_width", 229, 4, false),
    ("dev_item.sector_size", 233, 4, false),
    ("dev_item.type", 237, 8, false),
    ("dev_item.generation", 245, 8, false),
    ("dev_item.uuid", 267, 16, false),
    ("dev_item.fsid", 283, 16, false),
    ("label", 299, 256, false),
    ("cache_generation", 555, 8, false),
    ("uuid_tree_generation", 563, 8, false),
    ("metadata_uuid", 571, 16, false),
    ("sys_chunk_array", 811, 97, true),
    ("super_roots", 2859, 672, false),
];

#[test]
fn every_superblock_field_may_be_wrong() {
    let pristine = made();
    let original = pristine.read_at(64 << 10, 4096).unwrap();
    let mut rng = Rng::new(3);
    for &(name, offset, size, vital) in FIELDS {
        for kind in 0..5 {
            let mut wrong = original.clone();
            let field = &mut wrong[offset..offset + size];
            match kind {
                0 => field.fill(0),
                1 => field.fill(0xff),
                2 => field.copy_from_slice(&rng.bytes(size)),
                3 => field[0] ^= 1 << rng.below(8),
                _ => field[size / 2] ^= 1 << rng.below(8),
            }
            if wrong == original {
                continue;
            }
            let csum = CsumType::Crc32c.compute(&wrong[32..]);
            wrong[..32].copy_from_slice(&csum);
            let image = Image::copy_of(pristine.path()).unwrap();
            image.write_at(64 << 10, &wrong).unwrap();
            // Put the fault into the mirror too, which has its own address and checksum.
            wrong[48..56].copy_from_slice(&(64u64 << 20).to_le_bytes());
            if name == "bytenr" {
                wrong[48..56].copy_from_slice(&4711u64.to_le_bytes());
            }
            let csum = CsumType::Crc32c.compute(&wrong[32..]);
            wrong[..32].copy_from_slice(&csum);
            image.write_at(64 << 20, &wrong).unwrap();
            let before = image.digest().unwrap();
            let what = format!("{name}, kind {kind}");
            let listed = ubtrfs(&["ls".as_ref(), &inside(image.path(), "/")], &[]);
            let text = String::from_utf8_lossy(&listed.stderr);
            if listed.status.success() {
                assert!(!vital, "{what}: nobody noticed");
            } else {
                assert_eq!(listed.status.code(), Some(1), "{what}: {text}");
                error_line(&listed);
            }
            assert_eq!(before, image.digest().unwrap(), "{what}: reading changed the image");
            let changed = ubtrfs(&["mkdir".as_ref(), &inside(image.path(), "/new")], &[]);
            if !changed.status.success() {
                error_line(&changed);
                assert_eq!(before, image.digest().unwrap(), "{what}: a refused change changed the image");
            }
        }
    }
}

#[test]
fn a_wrong_checksum_of_the_superblock_is_told() {
    let image = made();
    for offset in [64 << 10, 64 << 20] {
        let raw = image.read_at(offset, 4096).unwrap();
        image.write_at(offset + 2000, &[raw[2000] ^ 1]).unwrap();
    }
    for line in refused(&image) {
        assert!(line.contains("checksum") || line.contains("superblock"), "{line}");
    }
}

#[test]
fn a_mount_without_dev_fuse_or_fusermount_says_what_is_missing() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let image = made();
    let before = image.digest().unwrap();
    let dir = TempDir::new().unwrap();
    // Run in a mount namespace with an empty /dev.
    let script = r#"mount -t tmpfs none /dev && exec "$@""#;
    let mut command = namespace(dir.path());
    command.args(["sh", "-c", script, "sh", UBTRFS, "mount"]).args([image.path(), dir.path()]);
    let line = error_line(&command.env("LC_ALL", "C").stdin(Stdio::null()).output().unwrap());
    assert!(line.contains("/dev/fuse"), "{line}");

    // Run as an ordinary user without fusermount3: empty directories hide /usr/bin and /usr/local/bin, so the programs
    // that the test needs are copied elsewhere.
    let home = TempDir::new().unwrap();
    let copy = |from: &OsStr, name: &str| {
        let to = home.path().join(name);
        fs::copy(from, &to).unwrap();
        std::os::unix::fs::chown(&to, Some(65_534), Some(65_534)).unwrap();
        to
    };
    let setpriv = Command::new("sh").args(["-c", "command -v setpriv"]).output().unwrap().stdout;
    let setpriv = copy(OsStr::new(String::from_utf8(setpriv).unwrap().trim()), "setpriv");
    let (program, own) = (copy(OsStr::new(UBTRFS), "ubtrfs"), copy(image.path().as_os_str(), "own.img"));
    let point = home.path().join("point");
    fs::create_dir(&point).unwrap();
    for path in [home.path(), &point] {
        std::os::unix::fs::chown(path, Some(65_534), Some(65_534)).unwrap();
    }
    let script = r#"mount -t tmpfs none /usr/local/bin && mount -t tmpfs none /usr/bin && exec "$@""#;
    let mut command = namespace(home.path());
    command.args(["sh", "-c", script, "sh"]).arg(setpriv).args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    command.arg(program).arg("mount").args([own, point]);
    let line = error_line(&command.env("LC_ALL", "C").stdin(Stdio::null()).output().unwrap());
    assert!(line.contains("fusermount3"), "{line}");
    assert_eq!(before, image.digest().unwrap());
}
