//! Tests of commands that walk a directory tree, on crafted images: names that lead outside, directories inside
//! themselves or with two names. Each command ends in time, does not panic, and changes nothing outside its target.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use ubtrfs_format::KeyType;
use ubtrfs_testkit::capability::{kernel_oracle, program};
use ubtrfs_testkit::hostile::SeedImage;
use ubtrfs_testkit::{Image, Medium, Rng, crafted};

/// Runs a command; fails if it panics or does not end.
fn ends(title: &str, dir: &Path, args: &[&str]) -> Output {
    let output = Command::new("timeout")
        .args(["60", env!("CARGO_BIN_EXE_ubtrfs")])
        .args(args)
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 1)), "{title}: {args:?}: {}: {stderr}", output.status);
    output
}

/// Lists everything below a directory except `target`, with its content.
fn outside(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.file_name().unwrap() == "target" {
                continue;
            }
            let is_dir = entry.file_type().unwrap().is_dir();
            found.insert(path.clone(), if is_dir { Vec::new() } else { fs::read(&path).unwrap() });
            if is_dir {
                todo.push(path);
            }
        }
    }
    found
}

fn is_refused(output: &Output) -> bool {
    !output.status.success() && output.stderr.starts_with(b"ubtrfs: ")
}

#[test]
fn no_walk_leaves_its_target_or_goes_on_forever() {
    if !kernel_oracle() || !program("tar") {
        return;
    }
    for (title, image) in crafted::hostile_trees().unwrap() {
        let dir = tempfile::tempdir().unwrap();
        // The target is nested so deep that the crafted names (`../..`) do not lead out of the test's directory.
        let work = dir.path().join("1/2/3/4/5/work");
        fs::create_dir_all(work.join("target/deeper")).unwrap();
        fs::write(work.join("x"), "sentinel").unwrap();
        fs::write(work.join("target/x"), "sentinel").unwrap();
        let at = |path: &str| format!("{}:{path}", image.path().display());
        let before = outside(dir.path());
        let tmp = |name: &str| Path::new("/tmp").join(name).symlink_metadata().is_ok();
        let was_in_tmp = [tmp("x"), tmp("ubtrfs-leak")];

        let copied = ends(&title, &work, &["cp", "-r", &at("/"), "target/deeper"]);
        ends(&title, &work, &["cp", "-a", &at("/outer/."), "target/deeper"]);
        let listed = ends(&title, &work, &["ls", "-lR", &at("/")]);
        ends(&title, &work, &["ls", "-R", "--json", &at("/outer")]);
        let found = ends(&title, &work, &["find", &at("/")]);
        ends(&title, &work, &["find", &at("/*/*/*/*/*"), "-name", "*"]);
        let exported = ends(&title, &work, &["export", "--output", "target/a.tar", &at("/")]);
        assert_eq!(outside(dir.path()), before, "{title}");
        assert_eq!([tmp("x"), tmp("ubtrfs-leak")], was_in_tmp, "{title}");
        assert_eq!(fs::read(work.join("target/x")).unwrap(), b"sentinel", "{title}");
        if title != "one name twice" {
            for (what, output) in [("cp", &copied), ("ls", &listed), ("find", &found), ("export", &exported)] {
                assert!(is_refused(output), "{title}: {what}: {output:?}");
            }
        }
        // No member of the archive leads out of the tree.
        no_member_leads_out(&title, &fs::read(work.join("target/a.tar")).unwrap_or_default());
        let streamed = ends(&title, &work, &["export", &at("/")]);
        no_member_leads_out(&title, &streamed.stdout);

        // Copy inside an image, and from one image to another.
        let other = Image::empty(128 << 20).unwrap();
        ends(&title, &work, &["mkfs", "-q", &other.path().display().to_string()]);
        ends(&title, &work, &["cp", "-r", &at("/outer"), &format!("{}:/", other.path().display())]);
        ubtrfs_testkit::judge(other.path(), "", &[]).unwrap();
        let twin = Image::copy_of(image.path()).unwrap();
        let in_twin = format!("{}:/outer", twin.path().display());
        for words in [&["chmod", "-R", "u+w"][..], &["chown", "-R", "5:6"], &["touch", "-d", "@5"]] {
            ends(&title, &work, &[words, &[in_twin.as_str()]].concat());
        }
        ends(&title, &work, &["mv", &in_twin, &format!("{}:/moved", twin.path().display())]);
        ends(&title, &work, &["mv", &format!("{}:/moved", twin.path().display()), &in_twin]);
        ends(&title, &work, &["cp", "-r", &at("/outer"), &at("/copy")]);
        let removed = ends(&title, &work, &["rm", "-r", &format!("{}:/outer", twin.path().display())]);
        assert!(title == "one name twice" || is_refused(&removed), "{title}: rm: {removed:?}");
        assert_eq!(outside(dir.path()), before, "{title}");
    }
}

/// A file whose owner is the number that means "do not change" to chown(2) is refused and reported; all others are
/// copied.
#[test]
fn an_owner_that_is_no_user_is_refused() {
    let medium = SeedImage::get(0).edited(&|owner| owner == 5, &|key, data| {
        if key.item_type == KeyType::INODE_ITEM && key.objectid == 258 {
            data[44..48].copy_from_slice(&u32::MAX.to_le_bytes());
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    medium.save(&image).unwrap();
    fs::create_dir(dir.path().join("to")).unwrap();
    let copied = ends("cp -a", dir.path(), &["cp", "-a", "image:/.", "to"]);
    assert!(is_refused(&copied), "{copied:?}");
    assert!(String::from_utf8_lossy(&copied.stderr).contains("is not a valid user"), "{copied:?}");
    let refused = ends("--owner", dir.path(), &["cp", "-r", "--owner", "4294967295:0", "image:/.", "to"]);
    assert!(!refused.status.success());
}

/// Walks images that the fuzz target `walk` found.
#[test]
fn kept_inputs_of_the_fuzzer_are_walked_to_an_end() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/corpus/walk");
    for entry in fs::read_dir(kept).unwrap().map(Result::unwrap) {
        let input = fs::read(entry.path()).unwrap();
        let medium = SeedImage::get(usize::from(input[0])).mutated(&input[1..], &SeedImage::chosen_by(input[0]));
        walk(&entry.path().display().to_string(), &medium);
    }
}

/// Walks images made by Linux, with random false values and valid checksums.
#[test]
fn random_lies_are_walked_to_an_end() {
    let seed = Rng::seed_or(71);
    for round in 0..20 {
        println!("seed {} (UBTRFS_SEED={seed}, round {round})", seed + round);
        let mut rng = Rng::new(seed + round);
        let len = 8 * (1 + rng.index(12));
        let program = rng.bytes(len);
        let medium = SeedImage::get(rng.index(SeedImage::COUNT)).mutated(&program, &|owner| owner == 5 || owner >= 256);
        walk(&format!("seed {}", seed + round), &medium);
    }
}

/// Runs all walking commands on one image; only their targets may change.
fn walk(title: &str, medium: &Medium) {
    let dir = tempfile::tempdir().unwrap();
    let work = dir.path().join("work");
    fs::create_dir_all(work.join("target")).unwrap();
    fs::write(work.join("sentinel"), "sentinel").unwrap();
    let image = dir.path().join("target");
    medium.save(&image).unwrap();
    let at = |path: &str| format!("{}:{path}", image.display());
    let before = outside(dir.path());
    ends(title, &work, &["cp", "-r", &at("/."), "target"]);
    ends(title, &work, &["cp", "-a", &at("/."), "target"]);
    ends(title, &work, &["ls", "-lR", &at("/")]);
    ends(title, &work, &["find", "--json", &at("/")]);
    ends(title, &work, &["chmod", "-R", "u+w", &at("/*")]);
    ends(title, &work, &["chown", "-R", "5:6", &at("/")]);
    ends(title, &work, &["export", "-S", "-f", "target/a.tar", &at("/")]);
    let listed = ends(title, &work, &["ls", &at("/")]);
    for name in String::from_utf8_lossy(&listed.stdout).lines() {
        ends(title, &work, &["rm", "-r", &at(&format!("/{name}"))]);
    }
    assert_eq!(outside(dir.path()), before, "{title}");
}

fn no_member_leads_out(title: &str, archive: &[u8]) {
    for header in archive.chunks(512) {
        if header.len() < 512 || &header[257..262] != b"ustar" {
            continue;
        }
        let name: Vec<u8> = header[..100].iter().copied().take_while(|byte| *byte != 0).collect();
        let leads_out = name.starts_with(b"/") || name.split(|byte| *byte == b'/').any(|part| part == b"..");
        assert!(!leads_out, "{title}: {}", String::from_utf8_lossy(&name));
    }
}
