//! `ubtrfs inspect dump-tree`: prints every block of every tree, or of one tree, or one block.
//!
//! The order is: root tree, chunk tree, log root tree, then the trees in the root tree, then the logs.

use std::fs::File;
use std::io::{self, BufWriter, Seek, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use rustix::fs::{MemfdFlags, Mode, OFlags};
use serde_json::json;
use ubtrfs_device::Device;
use ubtrfs_format::item::RootItem;
use ubtrfs_format::print::{KeyText, PrintOptions, ToJson, node_json, print_node, superblock_json};
use ubtrfs_format::{Key, KeyType, Logical, RootId};

use super::blocks::{Blocks, InspectedBlock, Order, Pointer};
use super::json_stream::JsonStream;
use super::trees;
use crate::commands::committed::Committed;
use crate::commands::offline::with_members;
use crate::common::{OUTPUT_LOST, stdout, warn};
use crate::progs::{VERSION as PROGS_VERSION, is_progs};

/// Print the trees of a filesystem
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The image file or block device; all devices if the filesystem has several
    #[arg(value_name = "DEVICE", required = true)]
    devices: Vec<PathBuf>,
    /// Print only this tree, given by number or name
    #[arg(short, long, value_name = "TREE", value_parser = trees::parse)]
    tree: Option<RootId>,
    /// Print only the extent tree and the device tree
    #[arg(short, long, group = "part", conflicts_with_all = ["tree", "block"])]
    extents: bool,
    /// Print only the root tree, the chunk tree and the device tree
    #[arg(short, long, group = "part", conflicts_with_all = ["tree", "block"])]
    device: bool,
    /// Print only the UUID tree
    #[arg(short, long, group = "part", conflicts_with_all = ["tree", "block"])]
    uuid: bool,
    /// Print only the roots of the trees
    #[arg(short, long, conflicts_with_all = ["part", "tree", "block", "json"])]
    roots: bool,
    /// Print the roots of the trees, and those that the superblock keeps of earlier commits
    #[arg(short = 'R', long, conflicts_with_all = ["part", "tree", "block", "json"])]
    backups: bool,
    /// Read only the given devices; by default, the other devices of the filesystem are looked for
    #[arg(long)]
    noscan: bool,
    /// Print only this block; may be given several times
    #[arg(short, long, value_name = "BYTENR", conflicts_with = "tree")]
    block: Vec<u64>,
    /// With --block, print the blocks below it, too
    #[arg(long, requires = "block")]
    follow: bool,
    /// Print each block followed by the blocks below it, instead of level by level
    #[arg(long, conflicts_with = "bfs")]
    dfs: bool,
    /// Print level by level (default)
    #[arg(long)]
    bfs: bool,
    /// Print HIDDEN instead of names and values
    #[arg(long)]
    hide_names: bool,
    /// Print the checksum of each block
    #[arg(long)]
    csum_headers: bool,
    /// Print the checksums of data
    #[arg(long)]
    csum_items: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Prints the trees. Beside a writer, prints only a dump that is complete.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut committed = match args.noscan {
        true => Committed::open(&args.devices)?,
        false => Committed::open(&with_members(&args.devices)?)?,
    };
    let is_damaged = if committed.has_writer() {
        let (mut spool, lines, is_damaged) = committed.read_consistently(|devices| {
            let (spool, mut lines) = (unnamed_file()?, Vec::new());
            let is_damaged = dump(&args, devices, BufWriter::new(&spool), &mut |line| lines.push(line.to_owned()))
                .context("cannot keep the dump in a temporary file")?;
            Ok(((spool, lines, is_damaged), is_damaged))
        })?;
        let mut out = stdout();
        spool.rewind().and_then(|()| io::copy(&mut spool, &mut out)).and_then(|_| out.flush()).context(OUTPUT_LOST)?;
        lines.iter().for_each(|line| warn(line));
        is_damaged
    } else {
        dump(&args, committed.as_devices(), BufWriter::new(stdout()), &mut warn)?
    };
    Ok(if is_damaged { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// A file without a name in the directory for temporary files.
fn unnamed_file() -> anyhow::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let opened = rustix::fs::open(std::env::temp_dir(), flags, Mode::RUSR | Mode::WUSR);
    let opened = opened.or_else(|_| rustix::fs::memfd_create("dump", MemfdFlags::CLOEXEC));
    Ok(File::from(opened.context("cannot make a temporary file")?))
}

/// Writes the trees to `out`, and calls `tell` with a line for each damaged block. Returns whether there is damage.
fn dump(
    args: &Args,
    devices: Vec<Arc<dyn Device>>,
    out: impl Write,
    tell: &mut dyn FnMut(&str),
) -> anyhow::Result<bool> {
    let blocks = Blocks::open(devices)?;
    let options = PrintOptions {
        hide_names: args.hide_names,
        csum_headers: args.csum_headers,
        csum_items: args.csum_items,
        ..blocks.print_options()
    };
    let order = if args.dfs { Order::DepthFirst } else { Order::BreadthFirst };
    let output: Box<dyn DumpFormat + '_> =
        if args.json { Box::new(JsonOutput::new(out, options)) } else { Box::new(TextOutput { out, options }) };
    let mut dump = Dump { blocks: &blocks, output, order, is_damaged: false, tell };
    dump.all(args).context(OUTPUT_LOST)?;
    Ok(dump.is_damaged)
}

/// A tree to print: its root, and the key of its root item.
struct DumpedTree {
    title: &'static str,
    key: Option<Key>,
    root: Pointer,
}

struct Dump<'a> {
    blocks: &'a Blocks,
    output: Box<dyn DumpFormat + 'a>,
    order: Order,
    is_damaged: bool,
    /// Takes a line for each damaged block.
    tell: &'a mut dyn FnMut(&str),
}

impl Dump<'_> {
    fn all(&mut self, args: &Args) -> io::Result<()> {
        self.output.start(self.blocks)?;
        for &bytenr in &args.block {
            let pointer = Pointer::bare(Logical(bytenr));
            self.walk_blocks(pointer, args.follow)?;
        }
        if args.block.is_empty() {
            let trees = self.trees();
            if args.roots || args.backups {
                trees.iter().try_for_each(|tree| self.output.root(tree))?;
            }
            if args.backups {
                self.output.backups(self.blocks)?;
            }
            let wanted: Vec<&DumpedTree> = trees.iter().filter(|tree| args.wants(tree)).collect();
            // As in btrfs-progs, a tree that does not exist is no error for `btrfs`.
            if wanted.is_empty() && args.tree.is_some() && !is_progs() {
                let name = args.tree.unwrap_or_default();
                (self.tell)(&format!("there is no tree {name} here; without -t all trees are printed"));
                self.is_damaged = true;
            }
            for tree in wanted {
                self.output.open_tree(tree)?;
                self.walk_blocks(tree.root, true)?;
                self.output.close_tree()?;
            }
        }
        // Dumps of a single block, and of a tree that the superblock refers to, have no totals.
        let of_superblock = [RootId::ROOT_TREE, RootId::CHUNK_TREE, RootId::TREE_LOG];
        let is_one = args.tree.is_some_and(|tree| of_superblock.contains(&tree));
        let is_part = args.extents || args.device || args.uuid;
        self.output.end(self.blocks, args.block.is_empty() && !is_one && !is_part)
    }

    fn walk_blocks(&mut self, root: Pointer, follow: bool) -> io::Result<()> {
        if follow {
            let Self { blocks, output, order, is_damaged, tell } = self;
            return blocks.walk(root, *order, &mut |pointer, block| {
                *is_damaged |= print_damage(block, *tell);
                output.block(pointer, block)
            });
        }
        let block = match self.blocks.read(&root) {
            Ok(block) => block,
            Err(error) => InspectedBlock { raw: Vec::new(), damage: Some(format!("block {}: {error}", root.bytenr)) },
        };
        self.is_damaged |= print_damage(&block, self.tell);
        self.output.block(&root, &block)
    }

    /// All trees in printing order.
    fn trees(&self) -> Vec<DumpedTree> {
        let (blocks, mut trees) = (self.blocks, Vec::new());
        trees.push(DumpedTree { title: "root tree", key: None, root: blocks.root_tree() });
        trees.push(DumpedTree { title: "chunk tree", key: None, root: blocks.chunk_root() });
        let log_root = blocks.log_root();
        trees.extend(log_root.map(|root| DumpedTree { title: "log root tree", key: None, root }));
        trees.extend(trees_of(blocks, blocks.root_tree()));
        trees.extend(log_root.into_iter().flat_map(|root| trees_of(blocks, root)));
        trees
    }
}

/// The roots of all trees except logs: tree, title, root block.
pub(super) fn roots(blocks: &Blocks) -> Vec<(RootId, &'static str, Pointer)> {
    let named = [blocks.root_tree(), blocks.chunk_root()].into_iter();
    let of_root_tree = trees_of(blocks, blocks.root_tree()).into_iter().map(|tree| tree.root);
    let with_id = |root: Pointer| root.tree.map(|id| (id, trees::title(id), root));
    named.chain(of_root_tree).filter_map(with_id).collect()
}

impl Args {
    /// Whether to print the blocks of a tree. Without a choice, all trees are printed. Choosing the log tree selects the
    /// log root tree and all logs.
    fn wants(&self, tree: &DumpedTree) -> bool {
        let of = |choice: RootId| match tree.key {
            Some(key) => RootId(key.objectid) == choice,
            None => tree.root.tree == Some(choice),
        };
        let is_one_of = |choices: &[RootId]| choices.iter().any(|choice| of(*choice));
        match self {
            Self { roots: true, .. } | Self { backups: true, .. } => false,
            Self { extents: true, .. } => is_one_of(&[RootId::EXTENT_TREE, RootId::DEV_TREE]),
            Self { device: true, .. } => is_one_of(&[RootId::ROOT_TREE, RootId::CHUNK_TREE, RootId::DEV_TREE]),
            Self { uuid: true, .. } => of(RootId::UUID_TREE),
            Self { tree, .. } => tree.is_none_or(of),
        }
    }
}

/// Returns the trees whose root items are in a root tree. Damage is reported when the root tree is printed.
fn trees_of(blocks: &Blocks, root: Pointer) -> Vec<DumpedTree> {
    let mut trees = Vec::new();
    blocks.each_item(root, &mut |key, data| {
        if key.item_type != KeyType::ROOT_ITEM {
            return;
        }
        let Ok(item) = RootItem::decode_any(data) else { return };
        let tree = RootId(key.objectid);
        trees.push(DumpedTree {
            title: trees::title(tree),
            key: Some(key),
            root: Pointer {
                bytenr: item.bytenr,
                tree: Some(tree),
                // The generation in a log's root item may be older than that of the root block, because the item is written
                // before the last write of the block.
                generation: (tree != RootId::TREE_LOG).then_some(item.generation),
                level: Some(item.level),
                first_key: None,
            },
        });
    });
    trees
}

/// Passes on the damage of a block as one line. Returns whether the block is damaged.
fn print_damage(block: &InspectedBlock, tell: &mut dyn FnMut(&str)) -> bool {
    if let Some(damage) = &block.damage {
        tell(damage);
    }
    block.damage.is_some()
}

/// The format of a dump.
trait DumpFormat {
    fn start(&mut self, blocks: &Blocks) -> io::Result<()>;
    fn open_tree(&mut self, tree: &DumpedTree) -> io::Result<()>;
    /// Prints only the root of a tree, if the format has a line for that.
    fn root(&mut self, tree: &DumpedTree) -> io::Result<()>;
    /// Prints the roots of earlier commits, if the format has lines for that.
    fn backups(&mut self, blocks: &Blocks) -> io::Result<()>;
    fn block(&mut self, pointer: &Pointer, block: &InspectedBlock) -> io::Result<()>;
    fn close_tree(&mut self) -> io::Result<()>;
    fn end(&mut self, blocks: &Blocks, with_totals: bool) -> io::Result<()>;
}

struct TextOutput<W> {
    out: W,
    options: PrintOptions,
}

impl<W: Write> DumpFormat for TextOutput<W> {
    fn start(&mut self, _blocks: &Blocks) -> io::Result<()> {
        match is_progs() {
            true => writeln!(self.out, "btrfs-progs v{PROGS_VERSION}"),
            false => writeln!(self.out, "ubtrfs v{}", env!("CARGO_PKG_VERSION")),
        }
    }

    fn open_tree(&mut self, tree: &DumpedTree) -> io::Result<()> {
        match &tree.key {
            Some(key) => writeln!(self.out, "{} key {} ", tree.title, KeyText(key)),
            None => writeln!(self.out, "{}", tree.title),
        }
    }

    fn root(&mut self, tree: &DumpedTree) -> io::Result<()> {
        let (bytenr, level) = (tree.root.bytenr, tree.root.level.unwrap_or_default());
        match &tree.key {
            Some(key) => writeln!(self.out, "{} key {} {bytenr} level {level}", tree.title, KeyText(key)),
            None => writeln!(self.out, "{}: {bytenr} level {level}", tree.title),
        }
    }

    fn backups(&mut self, blocks: &Blocks) -> io::Result<()> {
        for (slot, backup) in blocks.superblock().super_roots.iter().enumerate() {
            writeln!(self.out, "btrfs root backup slot {slot}")?;
            let roots = [
                ("\ttree", backup.tree_root, backup.tree_root_gen),
                ("\t\textent", backup.extent_root, backup.extent_root_gen),
                ("\t\tchunk", backup.chunk_root, backup.chunk_root_gen),
                ("\t\tdevice", backup.dev_root, backup.dev_root_gen),
                ("\t\tcsum", backup.csum_root, backup.csum_root_gen),
                ("\t\tfs", backup.fs_root, backup.fs_root_gen),
            ];
            for (name, bytenr, generation) in roots {
                writeln!(self.out, "{name} root gen {generation} block {bytenr}")?;
            }
            let (used, total, devices) = (backup.bytes_used, backup.total_bytes, backup.num_devices);
            writeln!(self.out, "\t\t{used} used {total} total {devices} devices")?;
        }
        Ok(())
    }

    fn block(&mut self, _pointer: &Pointer, block: &InspectedBlock) -> io::Result<()> {
        if block.raw.is_empty() {
            return Ok(());
        }
        let mut text = String::new();
        print_node(&block.raw, &self.options, &mut text).map_err(io::Error::other)?;
        self.out.write_all(text.as_bytes())
    }

    fn close_tree(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn end(&mut self, blocks: &Blocks, with_totals: bool) -> io::Result<()> {
        if with_totals {
            let superblock = blocks.superblock();
            writeln!(self.out, "total bytes {}", superblock.total_bytes)?;
            writeln!(self.out, "bytes used {}", superblock.bytes_used)?;
            writeln!(self.out, "uuid {}", superblock.fsid)?;
        }
        self.out.flush()
    }
}

/// A dump as one JSON object, with the superblock and the array `trees`, whose objects have a title, a key and the
/// array `blocks`. With --block, the array `blocks` is at the top.
struct JsonOutput<W> {
    stream: JsonStream<W>,
    options: PrintOptions,
    has_trees: bool,
    has_blocks: bool,
}

impl<W: Write> JsonOutput<W> {
    fn new(out: W, options: PrintOptions) -> Self {
        Self { stream: JsonStream::new(out), options, has_trees: false, has_blocks: false }
    }
}

impl<W: Write> DumpFormat for JsonOutput<W> {
    fn start(&mut self, blocks: &Blocks) -> io::Result<()> {
        self.stream.object()?;
        self.stream.field("superblock", &superblock_json(&blocks.superblock().encode_with_csum()))
    }

    fn open_tree(&mut self, tree: &DumpedTree) -> io::Result<()> {
        if !std::mem::replace(&mut self.has_trees, true) {
            self.stream.array("trees")?;
        }
        self.stream.object()?;
        self.stream.field("title", &json!(tree.title))?;
        if let Some(key) = &tree.key {
            self.stream.field("key", &key.to_json())?;
        }
        self.stream.array("blocks")
    }

    fn root(&mut self, _tree: &DumpedTree) -> io::Result<()> {
        Ok(())
    }

    fn backups(&mut self, _blocks: &Blocks) -> io::Result<()> {
        Ok(())
    }

    fn block(&mut self, pointer: &Pointer, block: &InspectedBlock) -> io::Result<()> {
        if !self.has_trees && !std::mem::replace(&mut self.has_blocks, true) {
            self.stream.array("blocks")?;
        }
        let mut value = if block.raw.is_empty() {
            json!({ "bytenr": pointer.bytenr.0 })
        } else {
            node_json(&block.raw, &self.options)
        };
        if let (Some(object), Some(damage)) = (value.as_object_mut(), &block.damage) {
            object.insert("damage".to_owned(), json!(damage));
        }
        self.stream.element(&value)
    }

    fn close_tree(&mut self) -> io::Result<()> {
        self.stream.close()?;
        self.stream.close()
    }

    fn end(&mut self, _blocks: &Blocks, _with_totals: bool) -> io::Result<()> {
        if self.has_trees || self.has_blocks {
            self.stream.close()?;
        }
        self.stream.close()
    }
}
