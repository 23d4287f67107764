//! Compares `ubtrfs inspect` with `btrfs inspect-internal`, on images made by Linux and on damaged images.
//!
//! Method: both programs print one image, and all lines except the first (the program's version) must be equal. Then
//! blocks are damaged: the walk continues, reports the damage, and ends. Without the kernel's btrfs, the test says that
//! it skips.

use std::path::Path;
use std::process::{Command, Output};

use ubtrfs_format::node::{NodeBuilder, NodeHeader, NodeView, finish_block};
use ubtrfs_format::{CsumType, Generation, Key, KeyType, Logical};
use ubtrfs_testkit::{Image, KernelImage, KernelImageSpec, LoopMount, RawBlock, capability, run};

fn inspect(image: &Path, args: &[&str]) -> Output {
    let program = Command::new(env!("CARGO_BIN_EXE_ubtrfs")).arg("inspect").args(args).arg(image).output();
    program.unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Compares the output of both programs after the line with the version. The tests pass `--hide-names`, because some
/// names contain line breaks, which ubtrfs escapes and btrfs-progs does not. Even then, btrfs-progs prints the names of
/// subvolumes, so this function replaces these names by `HIDDEN` in the output of btrfs-progs.
fn assert_same(image: &Path, args: &[&str]) {
    let ours = inspect(image, args);
    assert!(ours.status.success(), "{args:?}: {}", String::from_utf8_lossy(&ours.stderr));
    let path = image.to_str().unwrap();
    let theirs = run("btrfs", [&["inspect-internal"], args, &[path]].concat()).unwrap();
    let ours = stdout(&ours);
    let skip = usize::from(args[0] == "dump-tree");
    for (index, (ours, theirs)) in ours.lines().zip(theirs.lines()).enumerate().skip(skip) {
        let is_root_ref = theirs.starts_with("\t\troot ref key") || theirs.starts_with("\t\troot backref key");
        let theirs = match theirs.split_once(" name ") {
            Some((head, _)) if is_root_ref => format!("{head} name HIDDEN"),
            _ => theirs.to_owned(),
        };
        assert_eq!(ours, theirs, "{args:?}, line {index}");
    }
    assert_eq!(ours.trim_end().lines().count(), theirs.trim_end().lines().count(), "{args:?}");
}

#[test]
fn the_text_is_that_of_btrfs_progs() {
    if !capability::kernel_oracle() {
        return;
    }
    for name in ["default", "sha256, nodes of 4 KiB", "mixed"] {
        let made = KernelImage::rich(KernelImageSpec::named(name), 1).unwrap();
        let image = made.image.path();
        assert_same(image, &["dump-super"]);
        assert_same(image, &["dump-super", "-f", "-a"]);
        assert_same(image, &["dump-tree", "--hide-names"]);
        assert_same(image, &["dump-tree", "--dfs", "-t", "fs", "--hide-names"]);
        assert_same(image, &["dump-tree", "-t", "extent", "--csum-headers", "--hide-names"]);
        assert_same(image, &["dump-tree", "-t", "chunk", "--hide-names"]);

        let json = inspect(image, &["dump-tree", "--json"]);
        let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
        assert!(json["trees"].as_array().unwrap().len() > 8);
        let json = inspect(image, &["dump-super", "--all", "--json"]);
        let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
        assert_eq!(json[1]["superblock"]["csum_matches"], true);
    }
}

#[test]
fn a_damaged_block_is_told_and_the_walk_goes_on() {
    if !capability::kernel_oracle() {
        return;
    }
    let made = KernelImage::rich(KernelImageSpec::named("nodes of 4 KiB"), 2).unwrap();
    let image = &made.image;
    let untouched = inspect(image.path(), &["dump-tree", "-t", "fs"]);
    let block = fs_leaf(image);
    // If only one copy of a block is bad, the output shows the whole tree, and the bad copy is not repaired.
    image.write_at(block.copies[0] + 2000, b"damage").unwrap();
    let digest = image.digest().unwrap();
    let one_bad = inspect(image.path(), &["dump-tree", "-t", "fs"]);
    assert!(one_bad.status.success());
    assert_eq!(stdout(&one_bad), stdout(&untouched));
    assert_eq!(image.digest().unwrap(), digest);
    // Damage all copies.
    for copy in &block.copies {
        image.write_at(copy + 2000, b"damage").unwrap();
    }
    let all_bad = inspect(image.path(), &["dump-tree", "-t", "fs"]);
    assert_eq!(all_bad.status.code(), Some(1));
    let told = String::from_utf8_lossy(&all_bad.stderr).into_owned();
    assert!(told.lines().count() == 1 && told.contains(&format!("bytenr {}", block.bytenr)), "{told}");
    let heads = |output: &Output| stdout(output).lines().filter(|line| line.starts_with("leaf ")).count();
    assert_eq!(heads(&all_bad), heads(&untouched));
    for copy in &block.copies {
        image.write_at(*copy, &[0xff; 4096]).unwrap();
    }
    assert_eq!(inspect(image.path(), &["dump-tree", "--json"]).status.code(), Some(1));
    assert_ne!(image.digest().unwrap(), digest);
}

#[test]
fn a_tree_that_points_to_itself_ends() {
    if !capability::kernel_oracle() {
        return;
    }
    let made = KernelImage::rich(KernelImageSpec::named("nodes of 4 KiB"), 3).unwrap();
    let image = &made.image;
    let blocks = RawBlock::live(image).unwrap();
    let top = blocks.iter().filter(|block| block.owner == 5).max_by_key(|block| block.level).unwrap();
    assert!(top.level > 0);
    let raw = image.read_at(top.copies[0], 4096).unwrap();
    let view = NodeView::new(&raw).unwrap();
    // Make all pointers lead to the node itself, or all to one child.
    for target in [top.bytenr, view.child(0).unwrap().0.0] {
        let mut node = NodeBuilder::new(4096);
        for objectid in 256..256 + 100 {
            let key = Key::new(objectid, KeyType::INODE_ITEM, 0);
            assert!(node.push(&key, Logical(target), Generation(1)));
        }
        let mut raw = node.finish(&NodeHeader {
            fsid: view.fsid(),
            chunk_tree_uuid: view.chunk_tree_uuid(),
            bytenr: view.bytenr(),
            generation: view.generation(),
            owner: view.owner(),
            level: view.level(),
            flags: 0,
        });
        finish_block(&mut raw, CsumType::Crc32c);
        for copy in &top.copies {
            image.write_at(*copy, &raw).unwrap();
        }
        let output = inspect(image.path(), &["dump-tree", "-t", "5"]);
        let nodes = stdout(&output).lines().filter(|line| line.starts_with(&format!("node {target} level"))).count();
        assert!(nodes <= 1, "{nodes}");
    }
}

#[test]
fn a_missing_superblock_or_tree_is_one_error_line() {
    let image = Image::empty(1 << 20).unwrap();
    for args in [&["dump-super"][..], &["dump-tree"], &["dump-tree", "-t", "nonsense"], &["dump-super", "-s", "2"]] {
        let output = inspect(image.path(), args);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        // An error in the arguments has a second line with a hint to the help.
        let lines = told.lines().filter(|line| *line != "For more, see: ubtrfs inspect dump-tree --help").count();
        assert!(output.status.code() == Some(1) && lines == 1, "{args:?}: {told}");
        assert!(told.starts_with("ubtrfs: "), "{told}");
    }
}

/// The trees have up to three levels, seeks in both directions, and clusters.
#[test]
fn the_layout_of_trees_is_told_as_by_btrfs_progs() {
    if !capability::kernel_oracle() {
        return;
    }
    for (nr_files, options) in [(0, &[][..]), (300, &[]), (3000, &["-n", "4096"]), (3000, &["-m", "single"])] {
        let image = Image::kernel_made(512 << 20, options).unwrap();
        let linux = LoopMount::new(image.path(), "").unwrap();
        for nr in 0..nr_files {
            let dir = linux.join(format!("d{}", nr % 17));
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join(format!("f{nr}")), vec![7; [10, 100, 1500, 5000][nr % 4]]).unwrap();
            if nr % 100 == 0 {
                run("sync", ["-f", linux.path().to_str().unwrap()]).unwrap();
            }
        }
        linux.close().unwrap();
        let without_time = |text: &str| -> Vec<String> {
            text.lines().filter(|line| !line.contains("read time")).map(str::to_owned).collect()
        };
        for args in [&["tree-stats"][..], &["tree-stats", "-b"]] {
            let ours = inspect(image.path(), args);
            let path = image.path().to_str().unwrap();
            let theirs = run("btrfs", [&["inspect-internal"], args, &[path]].concat()).unwrap();
            assert!(ours.status.success() && stdout(&ours).contains("Total read time: "), "{ours:?}");
            assert_eq!(without_time(&stdout(&ours)), without_time(&theirs), "{nr_files} files, {args:?}");
        }
    }
}

/// Returns a leaf of the top-level subvolume.
fn fs_leaf(image: &Image) -> RawBlock {
    let blocks = RawBlock::live(image).unwrap();
    blocks.into_iter().find(|block| block.owner == 5 && block.level == 0 && block.copies.len() == 2).unwrap()
}

/// The numbers of the map are those of the image, and a file written by turns with another lies in pieces.
#[test]
fn the_map_shows_block_groups_where_they_lie_and_the_files_in_most_pieces() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &["-m", "dup"]).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    let (one, two) = (linux.join("a<b>&'c'"), linux.join("two"));
    for nr in 0..20_u64 {
        for path in [&one, &two] {
            let mut file = std::fs::File::options().create(true).append(true).open(path).unwrap();
            std::io::Write::write_all(&mut file, &vec![nr as u8; 64 << 10]).unwrap();
            file.sync_all().unwrap();
        }
    }
    run("btrfs", ["subvolume", "create", linux.join("s").to_str().unwrap()]).unwrap();
    std::fs::create_dir(linux.join("s/d")).unwrap();
    std::fs::write(linux.join("s/d/whole"), vec![1; 1 << 20]).unwrap();
    linux.close().unwrap();

    let map: serde_json::Value = serde_json::from_str(&stdout(&inspect(image.path(), &["map", "--json"]))).unwrap();
    let [device] = map["devices"].as_array().unwrap().as_slice() else { panic!("{map}") };
    assert_eq!(device["size"], 512 << 20);
    // As Linux's device tree has them.
    let tree = run("btrfs", ["inspect-internal", "dump-tree", "-t", "dev", image.path().to_str().unwrap()]).unwrap();
    let theirs: Vec<u64> = tree
        .lines()
        .filter_map(|line| line.split_once("key (1 DEV_EXTENT ")?.1.split_once(')')?.0.parse().ok())
        .collect();
    let extents = device["extents"].as_array().unwrap();
    assert_eq!(extents.iter().map(|extent| extent["start"].as_u64().unwrap()).collect::<Vec<_>>(), theirs);
    let metadata = extents.iter().filter(|extent| extent["type"] == "Metadata").collect::<Vec<_>>();
    assert_eq!(metadata.len(), 2, "both copies: {map}");
    assert!(metadata.iter().all(|extent| extent["profile"] == "DUP" && extent["used"].as_u64().unwrap() > 0));
    let files = map["worst_files"].as_array().unwrap();
    let paths: Vec<&str> = files.iter().map(|file| file["path"].as_str().unwrap()).collect();
    assert!(paths.contains(&"a<b>&'c'") && paths.contains(&"two") && paths.len() == 2, "{map}");
    assert_eq!(files[0]["pieces"].as_u64().unwrap(), 20, "{map}");
    assert_eq!(device["path"], image.path().to_str().unwrap());
    assert_eq!(map["all_files"]["bytes"].as_u64().unwrap(), ((20 * 128) << 10) + (1 << 20));

    let text = stdout(&inspect(image.path(), &["map", "--files", "1"]));
    assert!(text.contains("Metadata, DUP") && text.contains("unallocated"), "{text}");
    assert!(text.contains("0      1.00MiB reserved"), "{text}");
    assert!(text.contains("20 pieces") && !text.contains("s/d/whole"), "{text}");
    let dir = tempfile::tempdir().unwrap();
    let svg = dir.path().join("map.svg");
    assert!(inspect(image.path(), &["map", "--svg", svg.to_str().unwrap()]).status.success());
    // A parser of XML takes it, with the name of the file as a text.
    let parse = "import sys, xml.dom.minidom as m; print(m.parse(sys.argv[1]).documentElement.tagName)";
    assert_eq!(run("python3", ["-c", parse, svg.to_str().unwrap()]).unwrap().trim(), "svg");
    let svg = std::fs::read_to_string(svg).unwrap();
    assert!(svg.contains("a&lt;b&gt;&amp;&#39;c&#39;") && svg.contains("Metadata, DUP"), "{svg}");
}
