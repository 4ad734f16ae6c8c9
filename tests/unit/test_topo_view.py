"""How a topology is shown: exact text for a small one, JSON and back, and a page that no name can break out of."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from wsync.cli import main
from wsync.topo_view import LARGEST_MATRIX, as_html, as_text, matrices
from wsync.topology import Device, Domain, DomainKind, Host, Link, Nic, NicKind, Source, Topology


def small() -> Topology:
    paths = ("cuda_ipc", "ucx")
    devices = [
        Device.told(Source.DRIVER, device_id=f"{host}/gpu{i}", host_id=host, sku="H100-SXM5", paths=paths)
        for host in "ab"
        for i in range(2)
    ]
    nics = [
        Nic.told(Source.SYSFS, nic_id=f"{host}/mlx5_0", host_id=host, kind=NicKind.INFINIBAND, nbytes_per_s=50e9)
        for host in "ab"
    ]
    domain = Domain.told(
        Source.DRIVER, domain_id="a/nvlink0", kind=DomainKind.NVLINK, members=("a/gpu0", "a/gpu1"), nbytes_per_s=4.5e11
    )
    links = (Link(a="a/gpu0", b="a/gpu1", kind="NV18"), Link(a="a/gpu0", b="a/mlx5_0", kind="PIX"))
    return Topology(
        hosts=(Host.told(Source.PLATFORM, host_id="a", instance_type="p5.48xlarge"), Host(host_id="b")),
        devices=tuple(devices),
        nics=tuple(nics),
        domains=(domain,),
        links=links,
        notes=("amd: no answer",),
    )


TEXT = """\
host a: instance_type p5.48xlarge (platform)
  device gpu0: sku H100-SXM5 (driver), paths cuda_ipc/ucx (driver)
  device gpu1: sku H100-SXM5 (driver), paths cuda_ipc/ucx (driver)
  NIC mlx5_0: kind infiniband (sysfs), nbytes_per_s 5e+10 (sysfs)
host b: nothing is known of it
  device gpu0: sku H100-SXM5 (driver), paths cuda_ipc/ucx (driver)
  device gpu1: sku H100-SXM5 (driver), paths cuda_ipc/ucx (driver)
  NIC mlx5_0: kind infiniband (sysfs), nbytes_per_s 5e+10 (sysfs)
domain a/nvlink0 (nvlink): a/gpu0, a/gpu1; nbytes_per_s 4.5e+11 (driver)

a: links
            a/gpu0  a/gpu1  a/mlx5_0
  a/gpu0    X       NV18    PIX
  a/gpu1    NV18    X       ?
  a/mlx5_0  PIX     ?       X

b: links
            b/gpu0  b/gpu1  b/mlx5_0
  b/gpu0    X       ?       ?
  b/gpu1    ?       X       ?
  b/mlx5_0  ?       ?       X

devices: path
          a/gpu0    a/gpu1    b/gpu0  b/gpu1
  a/gpu0  X         cuda_ipc  nixl    nixl
  a/gpu1  cuda_ipc  X         nixl    nixl
  b/gpu0  nixl      nixl      X       shm
  b/gpu1  nixl      nixl      shm     X

hosts: path
     a     b
  a  X     nixl
  b  nixl  X

notes
  amd: no answer
"""


def test_text_shows_facts_with_their_sources_links_and_chosen_paths() -> None:
    assert as_text(small()) == TEXT


def test_a_machine_without_anything_says_so() -> None:
    assert as_text(Topology(hosts=(Host(host_id="a"),))) == (
        "host a: nothing is known of it\n  no accelerator was found\n  no NIC was found\n"
    )


class _Page(HTMLParser):
    """Collects tags, their attributes and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_has_everything_in_itself() -> None:
    page = _Page(as_html(small()))
    assert page.open == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    assert page.tags.count("table") == 4
    for text in ("gpu0 H100-SXM5", "mlx5_0 infiniband", "cuda_ipc", "nixl", "NV18", "amd: no answer"):
        assert text in page.texts
    assert ":root{color-scheme:light dark}" in as_html(small())


def test_the_page_draws_domains_around_their_devices() -> None:
    rack = Domain(domain_id="rack/r1", kind=DomainKind.RACK, members=("a",))
    page = as_html(msgspec.structs.replace(small(), domains=(*small().domains, rack)))
    a, b = page.split('<div class="host">')[1:]
    domain = a.split('<div class="domain" style="border-color:hsl(0 60% 50%)">')[1].split("</div>")[0]
    assert [part.split(">")[-1] for part in domain.split("</")][:-1] == [
        "a/nvlink0",
        "gpu0 H100-SXM5",
        "gpu1 H100-SXM5",
    ]
    assert '<i style="background:hsl(137 60% 50%)"></i>rack/r1</small>' in a
    assert "mlx5_0 infiniband" in a
    assert 'class="domain"' not in b
    assert "rack/r1" not in b.split("<h2>")[0]


def test_hosts_that_are_only_names_are_counted_and_not_drawn() -> None:
    """As Slurm's file tells them on each host of its cluster."""
    others = tuple(Host(host_id=f"n{number}") for number in range(2000))
    topology = msgspec.structs.replace(small(), hosts=(*small().hosts, *others))
    more = "2000 more hosts, of which only the name or the place is known: n0, n1, n2, n3, n4, n5, n6, n7, ..."
    assert as_text(topology) == TEXT.replace("domain a/nvlink0", f"{more}\ndomain a/nvlink0")
    page = _Page(as_html(topology))
    assert more in page.texts
    assert page.attributes.count(("class", "host")) == 2


def test_no_table_is_larger_than_anybody_reads() -> None:
    hosts = tuple(Host(host_id=f"n{number}", platform="aws") for number in range(LARGEST_MATRIX + 1))
    said = "hosts: path: no table of 129, `wsync.paths.between` tells of any two"
    assert as_text(Topology(hosts=hosts)).endswith(f"  no NIC was found\n\n{said}\n")
    page = _Page(as_html(Topology(hosts=hosts)))
    assert said in page.texts
    assert "table" not in page.tags
    assert len(matrices(Topology(hosts=hosts[1:]))[0].cells) == LARGEST_MATRIX


def test_names_cannot_break_out_of_the_page() -> None:
    evil = '"><script>alert(1)</script>'
    device = Device(device_id=f"h/{evil}", host_id="h", name=evil)
    topology = Topology(hosts=(Host(host_id="h", instance_type=evil),), devices=(device,), notes=(evil,))
    page = _Page(as_html(topology))
    assert "script" not in page.tags
    assert any(evil in text for text in page.texts)


def test_json_alone_is_printed_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.json"
    file.write_text(small().dump())
    assert main(["topo", "--file", str(file), "--json", "-"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["hosts"][0]["host_id"] == "a"
    file.write_text(out)
    assert Topology.load(file) == small()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read"),
        ("{", "is no topology"),
        ('{"hosts": [{"host_id": "a", "color": "red"}]}', "color"),
        ('{"devices": [{"device_id": "d", "host_id": "nowhere"}]}', "nowhere"),
    ],
)
def test_a_file_that_is_no_topology_is_named(
    content: str | None, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.json"
    if content is not None:
        file.write_text(content)
    assert main(["topo", "--file", str(file)]) == 1
    said = capsys.readouterr().err
    assert f"{file}" in said
    assert problem in said


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.json"
    file.write_text(small().dump())
    assert main(["topo", "--file", str(file), "--html", str(tmp_path / "no" / "page.html")]) == 1
    assert "cannot be written" in capsys.readouterr().err
