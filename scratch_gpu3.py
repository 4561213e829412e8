src=open("scratch_gpu.py").read(); src=src[:src.index('# fingerprint')]; exec(src)
import numpy as np, laststep.engine.copy.kernels as K
D="/tmp/gpurun"
side=torch.cuda.Stream()
tsr=[p.detach() for p in m.parameters()]+[s[k] for s in opt.state.values() for k in("exp_avg","exp_avg_sq")]
buf=torch.empty(tot+4096,dtype=torch.uint8,device=dev)
def ev(f,n=5):
    f(); torch.cuda.synchronize(); r=[]
    for _ in range(n):
        a=torch.cuda.Event(enable_timing=True); b=torch.cuda.Event(enable_timing=True); a.record(); f(); b.record(); torch.cuda.synchronize(); r.append(a.elapsed_time(b))
    return round(st.median(r),2)
src1=torch.empty(tot,dtype=torch.uint8,device=dev); print("plain d2d copy ms", ev(lambda: buf[:tot].copy_(src1)))
del src1
rows=[];o=0
for t in tsr: rows.append((t.data_ptr(),o,t.nbytes)); o+=t.nbytes
dst=[];o=0
for t in tsr: dst.append(buf[o:o+t.nbytes].view(t.dtype)); o+=t.nbytes
print("foreach ms", ev(lambda: torch._foreach_copy_(dst,[t.view(-1) for t in tsr])))
for tile in (64<<10,128<<10,256<<10,1<<20):
    K.TILE_BYTES=tile; c=K.Copies(rows,side)
    for items in (1024,2048,4096,8192):
        for warps in (4,8):
            def run():
                for al,cnt,tab in c._launches:
                    s,of,co=tab.columns("sources","offsets","counts")
                    K._copy_tiles[(cnt,)](s,of,co,buf,ALIGN=al,ITEMS=items,num_warps=warps)
            print(tile>>10,items,warps,ev(run),end=" | ")
    print()
K.TILE_BYTES=1<<20
for tile in (256<<10,1<<20):
    K.TILE_BYTES=tile; T=K.Tiles(tsr,side)
    for words in (1024,2048,4096):
        for warps in (4,8):
            a,c,f=T._table.columns("addresses","counts","firsts"); sums=torch.empty(len(T.owners),2,dtype=torch.int64,device=dev)
            print("fp",tile>>10,words,warps,ev(lambda: K._mix_tiles[(len(T.owners),)](a,c,f,sums,WORDS=words,num_warps=warps)),end=" | ")
    print()
K.TILE_BYTES=1<<20
del buf,dst; torch.cuda.empty_cache()
print("=== timeline")
shutil.rmtree(D,ignore_errors=True)
ck=laststep.Checkpointer(D,model=m,optimizer=opt); timed(15); ck._pool.wait_ready()
stream=torch.cuda.current_stream()
for rep in range(4):
    evs=[torch.cuda.Event(enable_timing=True) for _ in range(9)]; host=[]
    evs[0].record(); h=None
    for i in range(8):
        t0=time.perf_counter(); iteration(N); t1=time.perf_counter()
        if i==2 and rep%2==0: h=ck.save(rep*10)
        evs[i+1].record()
        t2=time.perf_counter(); stream.synchronize(); t3=time.perf_counter()
        if i==2 and rep%2==1: h=ck.save(rep*10); 
        t4=time.perf_counter()
        host.append([round((b-a)*1e3,1) for a,b in ((t0,t1),(t1,t2),(t2,t3),(t3,t4))])
    h.wait(); r=h.report
    print("gpu iter ms",[round(evs[i].elapsed_time(evs[i+1]),1) for i in range(8)]); print("  host enqueue/save/sync/save2",host)
    print("  stall %.1f devcopy %.1f captured %.0f opened %.0f written %.0f durable %.0f ms -> %.2f GB/s"%(r.stall_s*1e3,r.device_copy_s*1e3,r.captured_s*1e3,r.opened_s*1e3,r.written_s*1e3,r.durable_s*1e3,r.size_bytes/r.durable_s/1e9))
print("idle saves")
for k in range(3):
    stream.synchronize(); h=ck.save(1000+k); h.wait(); r=h.report
    print("  stall %.1f devcopy %.1f captured %.0f written %.0f durable %.0f ms -> %.2f GB/s; raw4 %.2f"%(r.stall_s*1e3,r.device_copy_s*1e3,r.captured_s*1e3,r.written_s*1e3,r.durable_s*1e3,r.size_bytes/r.durable_s/1e9, 0))
exec(open("scratch_gpu2.py").read().split('print("raw 7.26"')[0].split('exec(src)')[1])
exec(open("scratch_gpu.py").read().split('# raw write')[1].split('for mode in')[0])
for k in range(3):
    m2=state()
    o2=torch.optim.AdamW(m2.parameters(),foreach=True)
    ck2=laststep.Checkpointer(D,model=m2,optimizer=o2); ck2._pool.wait_ready()
    os.system("sync; echo 3 > /proc/sys/vm/drop_caches")
    t=time.perf_counter(); rr=ck2.restore(); torch.cuda.synchronize(); dt=time.perf_counter()-t
    f=f"{D}/{rr.folder}/optimizer.safetensors"
    print("restore GB/s", round(tot/dt/1e9,2), "raw read", [(t,rawread(f,os.path.getsize(f),t)) for t in (2,4)])
    ck2.close(); del m2,o2,ck2
ck.close()
